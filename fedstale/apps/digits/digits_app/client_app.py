"""What a device does: train the model it receives on its own digits, or evaluate it."""

from typing import Any, cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from digits_app import task
from fedstale.client import ForecastMod

app = ForecastMod(enabled_by="forecasts").client_app()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some epochs on this device."""
    network, given = _received(message), job(message, context)
    loss = task.train(network, **given)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(given["data"][0])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def job(message: Message, context: Context) -> dict[str, Any]:
    """Return what a device trains on; engines train many devices by it as one program."""
    config = context.run_config
    data, _ = _data(context)
    return {
        "data": data,
        "order": task.order(len(data[1]), int(config["local-epochs"]), _seed(message, context)),
        "batch_size": int(config["batch-size"]),
        "learning_rate": float(config["learning-rate"]),
    }


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on examples that this device does not train on."""
    _, data = _data(context)
    loss, accuracy = task.evaluate(_received(message), data)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_accuracy": accuracy, "num-examples": len(data[1])}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _received(message: Message) -> task.Network:
    network = task.Network()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return network


def _data(context: Context) -> tuple[task.Data, task.Data]:
    return task.client_data(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        float(context.run_config["alpha"]),
        int(context.run_config["seed"]),
    )


def _seed(message: Message, context: Context) -> tuple[int, ...]:
    server_round = cast(int, message.content.config_records["config"].get("server-round", 0))
    config, node = context.run_config, context.node_config
    return int(config["seed"]), int(node["partition-id"]), server_round
