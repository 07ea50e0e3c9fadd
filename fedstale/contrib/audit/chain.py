"""The lines of a record and the chain that they form; what is wrong with it is said by line.

Whatever a file holds, reading it executes nothing, and takes no more memory than its longest line
and the hashes of all.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fedstale.contrib.audit.record import NONE_BEFORE, RECORD
from fedstale.errors import ConfigError

MOST_LINE = 64_000_000
"""Bytes of a line: of a million nodes that become candidates at once, there are 21."""
MOST_FAULTS = 20
"""Faults that are named."""
_HEX = frozenset("0123456789abcdef")


class WrongError(Exception):
    """What is wrong with a line, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a record."""

    number: int
    """Its number in the chain, counted from 1."""
    before: str
    """Hash of the line before, as the line states it."""
    hash: str
    """Its own."""
    kind: str
    facts: Mapping[str, Any]
    """The rest of it."""


class ChainLink(NamedTuple):
    """What is kept of a line while the chain is looked at."""

    number: int
    before: str
    hash: str


def file_of(run: Path) -> Path:
    """Return the record of a run.

    Args:
        run: its folder, or the file itself.

    Raises:
        ConfigError: there is none.
    """
    path = run / RECORD if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(
            f"{str(run)!r} has no {RECORD}: expected a run of a strategy with AuditRecord(), or "
            "the file of a record"
        )
    return path


def lines(path: Path) -> Iterator[Line | str]:
    """Yield the lines of a file; in the place of one that cannot be read, why, and nothing more.

    Raises:
        ConfigError: the file cannot be read.
    """
    place = 0
    try:
        with path.open("rb") as file:
            while raw := file.readline(MOST_LINE + 1):
                place += 1
                try:
                    yield _line(raw)
                except WrongError as problem:
                    yield f"line {place} cannot be read: {problem}"
                    return
    except OSError as problem:
        raise ConfigError(f"{str(path)!r} cannot be read: {problem.strerror}") from None


def _line(raw: bytes) -> Line:
    if not raw.endswith(b"\n"):
        if len(raw) > MOST_LINE:
            raise WrongError(f"it has more than {MOST_LINE:,} bytes")
        raise WrongError("it has no end, so the file was cut in the midst of it")
    text = raw[:-1]
    try:
        facts = json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise WrongError("it is no text") from None
    except (ValueError, RecursionError) as problem:
        raise WrongError(f"it is no line of JSON ({problem})"[:200]) from None
    if not isinstance(facts, dict):
        raise WrongError("expected an object of JSON")
    number, before, kind = (facts.pop(name, None) for name in ("n", "before", "kind"))
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise WrongError("n: expected the number of the line, an integer >= 1")
    if (
        not isinstance(before, str)
        or len(before) != len(NONE_BEFORE)
        or not _HEX.issuperset(before)
    ):
        raise WrongError("before: expected the SHA-256 of the line before, 64 hex digits")
    if not isinstance(kind, str):
        raise WrongError("kind: expected a text")
    own = sha256(text).hexdigest()
    return Line(number=number, before=before, hash=own, kind=kind, facts=facts)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in it")
    return found


def broken(links: Sequence[ChainLink], before: ChainLink | None) -> list[str]:
    """Return where a chain is broken, in words; none if it holds.

    Args:
        links: of the lines of a file.
        before: the line that the first one follows, which is in another file; None for none.
    """
    found = []
    numbers = Counter(link.number for link in links)
    last = before or ChainLink(0, "", NONE_BEFORE)
    for i, link in enumerate(links):
        due = last.number + 1
        if numbers[link.number] > 1 and link.number < due:
            found.append(f"line {link.number} occurs twice: a line was inserted or copied")
        elif link.number > due and due not in numbers:
            gone = (
                f"line {due} is"
                if link.number == due + 1
                else f"lines {due} to {link.number - 1} are"
            )
            found.append(f"{gone} missing before line {link.number}")
        elif link.number != due:
            found.append(f"line {link.number} stands after line {last.number}: lines were swapped")
        elif link.before != last.hash:
            found.append(_altered(links, i, last))
        last = link
    return found


def _altered(links: Sequence[ChainLink], i: int, last: ChainLink) -> str:
    """Say which of two lines was altered whose numbers follow each other."""
    number = links[i].number
    if number == 1 or (i == 0 and last.number):
        return f"line {number} does not follow line {last.number} of the file before"
    if i + 1 < len(links):
        is_as_it_was = links[i + 1].before == links[i].hash
        return f"line {last.number if is_as_it_was else number} was altered"
    return f"line {last.number} or line {number}, the last one, was altered"
