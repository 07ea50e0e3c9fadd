"""What a device does: train the model it receives on its own lines, or evaluate it."""

from typing import Any

from flwr.app import Context, Message
from torch import Tensor

from fedstale.apps import characters, client
from fedstale.client import CompressionMod, ForecastMod
from shakespeare_app import task

app = ForecastMod(enabled_by="forecasts").client_app(around=[CompressionMod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some epochs on this device."""
    return client.trained(message, task.Network(), characters.mean_loss, job(message, context))


def job(message: Message, context: Context) -> dict[str, Any]:
    """Build the arguments of a training; engines train many devices by them as one program."""
    data, _ = _data(context)
    return {**client.job(message, context, (data,)), "max_norm": task.MAX_NORM}


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on lines that this device does not train on."""
    _, data = _data(context)
    loss, accuracy = characters.evaluate(client.received(message, task.Network()), data)
    return client.evaluated(message, loss, accuracy, len(data))


def _data(context: Context) -> tuple[Tensor, Tensor]:
    path = str(context.run_config["text"])
    return characters.of_device(path, *client.place(context), length=task.LENGTH)
