"""A text as examples of next-character prediction, and how the guesses of a model are evaluated.

An example is a run of characters; a model guesses each one from those before it. The alphabet is
fixed, so it does not depend on the text.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedstale.apps import play

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
N_CODES = len(ALPHABET) + 1
"""Codes of characters; the last one is that of all that are not in the alphabet."""

_CODES = {character: code for code, character in enumerate(ALPHABET)}


def encode(text: str, length: int) -> Tensor:
    """Cut a text into examples.

    Args:
        text: of more than `length` characters.
        length: characters of an example that are guessed.

    Returns:
        Codes, int64 of shape (n, length + 1), n >= 1: the last code of an example is the first of
        the next. The rest of the text that fills no example is left out.
    """
    codes = torch.tensor([_CODES.get(character, N_CODES - 1) for character in text])
    if len(codes) <= length:
        raise ValueError(f"a text of {len(codes)} characters: expected more than {length}")
    return codes.unfold(0, length + 1, length)


def split(examples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples to train on, and the last tenth (at least one) to evaluate on.

    A device with one example uses it for both.
    """
    n_test = max(1, len(examples) // 10)
    return examples[: max(1, len(examples) - n_test)], examples[-n_test:]


@lru_cache(maxsize=4096)
def of_device(
    path: str, partition: int, n_partitions: int, *, length: int
) -> tuple[Tensor, Tensor]:
    """Split a device's part of a play into examples for training and for evaluation.

    Args:
        path: of the play, as for `play.read_roles`.
        partition: of the device.
        n_partitions: number of devices.
        length: characters of an example that are guessed.
    """
    return split(encode(play.assign(path, n_partitions)[partition], length))


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
    for batch in torch.split(examples, 256):
        logits, targets = network(batch[:, :-1]), batch[:, 1:]
        mean = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss += mean.item() * len(batch)
        right += (logits.argmax(dim=2) == targets).double().mean().item() * len(batch)
    return loss / len(examples), right / len(examples)
