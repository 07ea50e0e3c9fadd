"""What a device does: train the model it receives on its own lines, or evaluate it."""

from typing import cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from shakespeare_app import play, task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some epochs on this device."""
    config = context.run_config
    network = _received(message)
    data, _ = _data(context)
    server_round = cast(int, message.content.config_records["config"].get("server-round", 0))
    loss = task.train(
        network,
        data,
        epochs=int(config["local-epochs"]),
        batch_size=int(config["batch-size"]),
        learning_rate=float(config["learning-rate"]),
        seed=(int(config["seed"]), int(context.node_config["partition-id"]), server_round),
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on lines that this device does not train on."""
    _, data = _data(context)
    loss, accuracy = task.evaluate(_received(message), data)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_accuracy": accuracy, "num-examples": len(data)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _received(message: Message) -> task.Network:
    network = task.Network()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return network


def _data(context: Context) -> tuple[Tensor, Tensor]:
    partition = int(context.node_config["partition-id"])
    n_partitions = int(context.node_config["num-partitions"])
    texts = play.deal(str(context.run_config["text"]), n_partitions)
    if not 0 <= partition < n_partitions:
        raise ValueError(
            f"partition-id = {partition}: expected 0 <= partition-id < num-partitions, "
            f"which is {n_partitions}; set both in the node config"
        )
    return task.split(task.encode(texts[partition]))
