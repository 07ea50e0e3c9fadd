"""What a device does: train the model it receives on its own images, or evaluate it."""

from typing import Any

from flwr.app import Context, Message

from fashion_app import task
from fedstale.apps import classification, client
from fedstale.client import CompressionMod, ForecastMod

app = ForecastMod(enabled_by="forecasts").client_app(around=[CompressionMod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some epochs on this device."""
    own = job(message, context)
    return client.trained(message, task.Network(), classification.mean_loss, own)


def job(message: Message, context: Context) -> dict[str, Any]:
    """Build the arguments of a training; engines train many devices by them as one program."""
    data, _ = _data(context)
    return client.job(message, context, data, stream=(task.SHUFFLE,))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on examples that this device does not train on."""
    _, data = _data(context)
    loss, accuracy = classification.evaluate(client.received(message, task.Network()), data)
    return client.evaluated(message, loss, accuracy, len(data[1]))


def _data(context: Context) -> tuple[classification.Data, classification.Data]:
    config = context.run_config
    return task.client_data(
        *client.place(context),
        data=str(config["data"]),
        alpha=float(config["alpha"]),
        seed=int(config["seed"]),
    )
