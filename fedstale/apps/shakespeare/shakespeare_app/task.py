"""The model, its loss, and how to evaluate it.

An example is a run of characters; the model guesses each one from those before it. The alphabet
is fixed, so it does not depend on the text.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

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


def losses(network: nn.Module, examples: Tensor) -> Tensor:
    """Return the mean loss of each example in nats a character."""
    logits = network(examples[:, :-1]).transpose(1, 2)
    return cross_entropy(logits, examples[:, 1:], reduction="none").mean(dim=1)


def mean_loss(network: nn.Module, examples: Tensor) -> Tensor:
    """Return the mean loss in nats a character."""
    return cross_entropy(network(examples[:, :-1]).flatten(0, 1), examples[:, 1:].flatten())


@torch.no_grad()
def evaluate(network: nn.Module, examples: Tensor) -> tuple[float, float]:
    """Return the mean loss in nats a character and the share of characters guessed."""
    loss = right = 0.0
    for batch in examples.split(256):
        logits, targets = network(batch[:, :-1]), batch[:, 1:]
        mean = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss += mean.item() * len(batch)
        right += (logits.argmax(dim=2) == targets).double().mean().item() * len(batch)
    return loss / len(examples), right / len(examples)
