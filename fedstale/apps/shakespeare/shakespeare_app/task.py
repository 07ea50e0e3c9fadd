"""The model, and how to train and evaluate it.

An example is a run of characters; the model guesses each one from those before it. The alphabet
is fixed, so it does not depend on the text. All randomness comes from explicit seeds, so every
process trains to the same bytes.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

Index = npt.NDArray[np.int64]

LENGTH = 80
"""Characters of one example."""
MAX_NORM = 1.0
"""Of the gradient of one step."""
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))

_UNKNOWN = len(ALPHABET)
_CODES = {character: code for code, character in enumerate(ALPHABET)}


class Network(nn.Module):
    """One GRU layer that predicts the next character at each place."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(len(ALPHABET) + 1, 16)
            self.recur = nn.GRU(16, 64, batch_first=True)
            self.guess = nn.Linear(64, len(ALPHABET) + 1)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        states, _ = self.recur(self.embed(codes))
        return self.guess(states)  # type: ignore[no-any-return]


class UnrolledNetwork(Network):
    """The same network out of plain operations, which torch.func can put on top of one another."""

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits of shape (n, length, characters) for codes of shape (n, length)."""
        cell = self.recur
        received = linear(self.embed(codes), cell.weight_ih_l0, cell.bias_ih_l0)
        state = received.new_zeros(len(codes), cell.hidden_size)
        states = []
        for each in received.unbind(1):
            remembered = linear(state, cell.weight_hh_l0, cell.bias_hh_l0)
            reset_x, update_x, new_x = each.chunk(3, 1)
            reset_h, update_h, new_h = remembered.chunk(3, 1)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            state = new + torch.sigmoid(update_x + update_h) * (state - new)
            states.append(state)
        return self.guess(torch.stack(states, 1))  # type: ignore[no-any-return]


def encode(text: str) -> Tensor:
    """Cut a text into examples.

    Returns:
        Codes, int64 of shape (n, LENGTH + 1), n >= 1: the last code of an example is the first of
        the next. The rest of the text that fills no example is left out.
    """
    codes = torch.tensor([_CODES.get(character, _UNKNOWN) for character in text])
    if len(codes) <= LENGTH:
        raise ValueError(f"a text of {len(codes)} characters: expected more than {LENGTH}")
    return codes.unfold(0, LENGTH + 1, LENGTH)


def split(examples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples to train on, and the last tenth (at least one) to evaluate on.

    A device with one example uses it for both.
    """
    n_test = max(1, len(examples) // 10)
    return examples[: max(1, len(examples) - n_test)], examples[-n_test:]


def order(n: int, epochs: int, seed: tuple[int, ...]) -> Index:
    """Return the order in which a device takes its n examples; shape (epochs, n).

    It depends on the seed alone, such as (seed, partition, round).
    """
    if epochs < 0:
        raise ValueError(f"local-epochs = {epochs}: expected a number >= 0")
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(n) for _ in range(epochs)], np.int64).reshape(epochs, n)


def losses(network: nn.Module, examples: Tensor) -> Tensor:
    """Return the mean loss of each example in nats a character."""
    logits = network(examples[:, :-1]).transpose(1, 2)
    return cross_entropy(logits, examples[:, 1:], reduction="none").mean(dim=1)


def train(
    network: nn.Module,
    data: tuple[Tensor],
    order: Index,
    *,
    batch_size: int,
    learning_rate: float,
    max_norm: float,
) -> float:
    """Train in place with SGD; return the mean loss of the last epoch in nats a character.

    Args:
        network: changed in place.
        data: the examples, as `encode` makes them.
        order: of the examples, one row an epoch; shape (epochs, examples).
        batch_size: examples of one step, >= 1.
        learning_rate: of SGD.
        max_norm: gradients longer than this are shortened to it.
    """
    if batch_size < 1:
        raise ValueError(f"batch-size = {batch_size}: expected a number >= 1")
    (examples,) = data
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    total = 0.0
    for epoch in torch.from_numpy(order):
        total = 0.0
        for batch in epoch.split(batch_size):
            optimizer.zero_grad()
            loss = _loss(network(examples[batch, :-1]), examples[batch, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
            optimizer.step()
            total += loss.item() * len(batch)
    return total / len(examples)


@torch.no_grad()
def evaluate(network: nn.Module, examples: Tensor) -> tuple[float, float]:
    """Return the mean loss in nats a character and the share of characters guessed."""
    loss = right = 0.0
    for batch in examples.split(256):
        logits = network(batch[:, :-1])
        loss += _loss(logits, batch[:, 1:]).item() * len(batch)
        right += (logits.argmax(dim=2) == batch[:, 1:]).double().mean().item() * len(batch)
    return loss / len(examples), right / len(examples)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
