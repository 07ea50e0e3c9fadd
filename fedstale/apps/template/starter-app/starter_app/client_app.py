"""What a device does: train the model it receives, or evaluate it."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from fedstale.client import CompressionMod, ForecastMod, local_steps
from starter_app import task

# A ClientApp, whose mods do nothing unless the server asks: Compression(), ForecastRequest() ...
app = ForecastMod(enabled_by="forecasts").client_app(around=[CompressionMod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some epochs on this device."""
    config = context.run_config
    network = _received(message)
    data = _data(context)
    loss = task.train(
        network,
        data,
        steps=local_steps(message, int(config["local-epochs"]), task.steps_per_epoch(data)),
        learning_rate=float(config["learning-rate"]),
        seed=(int(config["seed"]), int(context.node_config["partition-id"]), _number_of(message)),
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on this device."""
    data = _data(context)
    loss, accuracy = task.evaluate(_received(message), data)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_accuracy": accuracy, "num-examples": len(data[1])}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _number_of(message: Message) -> int:
    """Return a number that no other message has: a device that is asked twice draws twice."""
    about = message.metadata
    return int.from_bytes((about.message_id or repr(about.created_at)).encode())


def _received(message: Message) -> task.Network:
    network = task.Network()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return network


def _data(context: Context) -> task.Data:
    partition = int(context.node_config["partition-id"])
    return task.load_data(partition, int(context.run_config["seed"]))
