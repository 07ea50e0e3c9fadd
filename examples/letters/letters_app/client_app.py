"""What a site does: take some steps of AdamW, whose moments stay with it, or evaluate a model."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedstale.apps import characters, client
from fedstale.client import CompressionMod, ForecastMod, local_steps
from fedstale.contrib.sites import at_rank, keeping_moments
from letters_app import task

MAX_NORM = 1.0
"""Of the gradient of one step."""
BETAS, WEIGHT_DECAY = (0.9, 0.99), 0.1

app = ForecastMod(enabled_by="forecasts").client_app(around=[CompressionMod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model after some steps on this site."""
    config, (examples, _) = context.run_config, _data(context)
    network, n = _received(message, context), int(config["batch-size"])
    steps = local_steps(message, 1, int(config["local-steps"]))
    seed = int(config["seed"]), client.place(context)[0], client.number_of(message)
    order = client.order(len(examples), -(-steps * n // len(examples)), seed).reshape(-1)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=float(config["learning-rate"]),
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
    )
    total = 0.0
    with keeping_moments(optimizer, context):
        for batch in torch.from_numpy(order[: steps * n]).split(n):
            optimizer.zero_grad()
            loss = characters.mean_loss(network, examples[batch])
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
            optimizer.step()
            total += loss.item()
    # As many as a whole job has: the work of a share of it is a share of theirs.
    n_examples = int(config["local-steps"]) * n
    metrics = MetricRecord({"train_loss": total / max(steps, 1), "num-examples": n_examples})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return how well the model does on text that this site does not train on."""
    _, examples = _data(context)
    loss, accuracy = characters.evaluate(_received(message, context), examples)
    return client.evaluated(message, loss, accuracy, len(examples))


def _received(message: Message, context: Context) -> nn.Module:
    """Return the model in a message; of adapters the first, as many as this site's rank."""
    config = context.run_config
    if not (ranks := task.ranks(config)):
        return client.received(message, task.model(config))
    rank = ranks[client.place(context)[0] % len(ranks)]
    network = task.model(config, rank=rank)
    arrays = at_rank(message.content.array_records["arrays"], rank)
    network.load_state_dict(arrays.to_torch_state_dict())
    return network


def _data(context: Context) -> tuple[Tensor, Tensor]:
    path = str(context.run_config["text"])
    return characters.of_device(path, *client.place(context), length=task.LENGTH)
