"""The roles of a play as devices, and their lines as examples of next-character prediction.

A speech is a paragraph whose first line is the speaker's name and a colon. The last tenth of each
role is held out for the server. The rest is dealt to devices: roles are joined where there are
more roles than devices, and long roles are cut where there are fewer.

An example is a run of characters; a model guesses each one from those before it. The alphabet is
fixed, so it does not depend on the text.

Reference:
    Caldas et al. LEAF: A Benchmark for Federated Settings. 2018. There each role is one client.
"""

import gzip
import heapq
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MIN_CHARACTERS = 200
"""A device has at least this much text."""

_SPEAKER = re.compile(r"([^\n:]{1,60}):\n")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
N_CODES = len(ALPHABET) + 1
"""Codes of characters; the last one is that of all that are not in the alphabet."""

_CODES = {character: code for code, character in enumerate(ALPHABET)}


@lru_cache(maxsize=2)
def read_roles(path: str) -> dict[str, str]:
    """Read the lines of each role, in order of first appearance.

    Args:
        path: a .txt file, or the same compressed as .gz.

    Raises:
        ValueError: there is no such file, it cannot be read, or nobody speaks in it.
    """
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as problem:
        raise ValueError(
            f"text = {path!r}: expected a play as .txt or .gz in UTF-8; pass "
            f"--run-config 'text=\"PATH\"' ({problem})"
        ) from None
    roles: dict[str, list[str]] = {}
    speaker = None
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        if named := _SPEAKER.match(paragraph):
            speaker = named[1].strip()
        if speaker is not None:
            roles.setdefault(speaker, []).append(paragraph[named.end() if named else 0 :])
    if not roles:
        raise ValueError(
            f"text = {path!r}: nobody speaks in it; expected speeches separated by blank lines, "
            "whose first line is the speaker's name and a colon, such as ROMEO:"
        )
    return {role: "\n".join(speeches) + "\n" for role, speeches in roles.items()}


def held_out(path: str) -> str:
    """Return the last tenth of each role, joined."""
    return "".join(words[_train_length(words) :] for words in read_roles(path).values())


@lru_cache(maxsize=4)
def assign(path: str, n_partitions: int) -> list[str]:
    """Deal the text of the roles to devices, without what is held out.

    Args:
        path: as for `read_roles`.
        n_partitions: number of devices, >= 1.

    Returns:
        The text of each device, the longest role on the first.

    Raises:
        ValueError: there is no device, or too little text for so many.
    """
    if n_partitions < 1:
        raise ValueError(f"num-partitions = {n_partitions}: expected at least one device")
    pieces = sorted(_long_enough(read_roles(path).values()), key=len, reverse=True)
    longest_first = [(-len(piece), i, piece) for i, piece in enumerate(pieces)]
    for i in range(len(pieces), n_partitions):
        _, _, piece = heapq.heappop(longest_first)
        half = len(piece) // 2
        heapq.heappush(longest_first, (-half, 2 * i, piece[:half]))
        heapq.heappush(longest_first, (half - len(piece), 2 * i + 1, piece[half:]))
    return _joined([piece for _, _, piece in sorted(longest_first)], path, n_partitions)


def _long_enough(roles: Iterable[str]) -> list[str]:
    """Cut the roles' texts for training, small roles joined with the next small ones."""
    pieces = []
    small = ""
    for words in roles:
        mine = words[: _train_length(words)]
        if len(mine) < MIN_CHARACTERS:
            small += mine
            mine, small = (small, "") if len(small) >= MIN_CHARACTERS else ("", small)
        if mine:
            pieces.append(mine)
    if small:
        pieces.append((pieces.pop() if pieces else "") + small)
    return pieces


def _joined(pieces: list[str], path: str, n_partitions: int) -> list[str]:
    """Give each device one piece, then each further piece to the device that has least."""
    texts = pieces[:n_partitions]
    least_first = [(len(text), i) for i, text in enumerate(texts)]
    heapq.heapify(least_first)
    for piece in pieces[n_partitions:]:
        _, i = heapq.heappop(least_first)
        texts[i] += piece
        heapq.heappush(least_first, (len(texts[i]), i))
    if (fewest := min(map(len, texts))) < MIN_CHARACTERS:
        raise ValueError(
            f"num-partitions = {n_partitions}: with {path!r} some device would have {fewest} "
            f"characters, expected at least {MIN_CHARACTERS}; use fewer devices or a longer text"
        )
    return texts


def _train_length(words: str) -> int:
    return len(words) - len(words) // 10


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
        path: of the play, as for `read_roles`.
        partition: of the device.
        n_partitions: number of devices.
        length: characters of an example that are guessed.
    """
    return split(encode(assign(path, n_partitions)[partition], length))


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
