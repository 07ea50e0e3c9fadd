"""The model, and how to train and evaluate it.

An example is a run of characters; the model guesses each one from those before it. The alphabet
is fixed, so it does not depend on the text. All randomness comes from explicit seeds, so every
process trains to the same bytes.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LENGTH = 80
"""Characters of one example."""
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


def train(
    network: nn.Module,
    examples: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: tuple[int, ...],
) -> float:
    """Train in place with SGD; return the mean loss of the last epoch in nats a character.

    Args:
        network: changed in place.
        examples: as `encode` makes them.
        epochs: passes over the examples, >= 0.
        batch_size: examples of one step, >= 1.
        learning_rate: of SGD; gradients longer than 1 are shortened to 1.
        seed: what the order of the examples depends on, such as (seed, partition, round).
    """
    if batch_size < 1 or epochs < 0:
        raise ValueError(
            f"batch-size = {batch_size} and local-epochs = {epochs}: "
            "expected batch-size >= 1 and local-epochs >= 0"
        )
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in torch.from_numpy(rng.permutation(len(examples))).split(batch_size):
            optimizer.zero_grad()
            loss = _loss(network(examples[batch, :-1]), examples[batch, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
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
