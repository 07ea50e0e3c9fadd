"""Verify the record of a run: its chain, its head, and each of its picks."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

from fedstale.contrib.audit.chain import (
    MOST_FAULTS,
    ChainLink,
    Line,
    WrongError,
    broken,
    file_of,
    lines,
)
from fedstale.contrib.audit.record import RECORD
from fedstale.contrib.audit.replay import ReplayedRun
from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports import Run
from fedstale.runs import DEPLOYED, EVENTS, SUMMARY
from fedstale.strategies.selection import Selector

_MOST_KEPT = 16
"""States of a run that are kept for lines that go back to them."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What came of verifying a record."""

    lines: int
    """Lines that were read."""
    picks: int
    """Selections in them."""
    repeated: int
    """Those that were made again."""
    head: str
    """SHA-256 of the last line; empty where a line cannot be read."""
    faults: tuple[str, ...]
    """What is wrong, by line; empty if the record holds."""
    why_not: str
    """Why some picks could not be made again; empty if none was left."""
    notes: tuple[str, ...]
    """What is worth a look and no fault."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """All of it in a sentence."""
        if self.faults:
            n = len(self.faults)
            return f"the record does not hold: {n} {'fault' if n == 1 else 'faults'} found"
        if self.why_not:
            return (
                f"the chain of {self.lines:,} lines holds; of {self.picks:,} picks "
                f"{self.repeated:,} were made again: {self.why_not}"
            )
        return (
            f"the record holds: {self.lines:,} lines, and all {self.picks:,} picks made again as "
            "they were"
        )


def verify(
    runs: Run | str | Path | Sequence[Run | str | Path],
    *,
    head: str | None = None,
    signature: str | Path | None = None,
    key: str | Path | None = None,
    selectors: Sequence[type[Selector]] = (),
    agent: str | Path | None = None,
) -> Verification:
    """Check the chain of a record and make each of its picks again.

    Nothing that the record holds is executed: selectors are made of known classes and plain values.

    Args:
        runs: a run with a record, its folder, or the file; or the parts of one run that was taken
            up in other folders, in their order.
        head: the hash that the last line must have, or an earlier one that was published.
        signature: file with the server's ECDSA signature, by SHA-256, of the head as 64 hex digits.
        key: file with its public key, in PEM or OpenSSH's form, or its certificate.
        selectors: classes of your own that the run may have used.
        agent: folder of the agent that the run used; None for the one that comes with fedstale.

    Raises:
        ConfigError: there is no record, or a file cannot be read.
    """
    if (signature is None) != (key is None):
        raise ConfigError("signature and key: expected both, or none")
    some = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    paths = [run.folder if isinstance(run, Run) else Path(run) for run in some]
    parts = [_Part(path, names_file=len(paths) > 1) for path in paths]
    chain = _chain(parts)
    replay = ReplayedRun(selectors, None if agent is None else str(agent))
    faults = chain.faults
    notes: list[str] = []
    if not faults:
        faults = _faults_of_end(chain, parts[-1], head, notes)
        if signature is not None and key is not None:
            signed = head or chain.links[-1].hash
            faults += _faults_of_signature(signed, Path(signature), Path(key))
        # Numbers of a hostile record overflow; those of a run have warned when it went on.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _make_again(parts, chain, replay, faults, notes)
    return Verification(
        lines=len(chain.links),
        picks=replay.n_picks,
        repeated=replay.n_made,
        head=chain.links[-1].hash if chain.links else "",
        faults=tuple(faults[:MOST_FAULTS]),
        why_not=replay.why_not,
        notes=tuple(notes[:MOST_FAULTS]),
    )


class _Part:
    """One file of a record, and the folder of its run."""

    def __init__(self, run: Path, *, names_file: bool) -> None:
        self.folder = run if run.is_dir() else run.parent
        self.file = file_of(run)
        self.names_file = names_file

    @property
    def where(self) -> str:
        """What the words of a fault begin with."""
        return f"{self.file}: " if self.names_file else ""

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run; empty if there is none yet."""
        try:
            found = json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class _Chain:
    """The lines of all files, without what they say."""

    links: list[ChainLink]
    faults: list[str]
    targets: Counter[str]
    """Hashes of lines that later lines go back to, and how often."""
    last_kind: str = ""


def _chain(parts: Sequence[_Part]) -> _Chain:
    """Return the chain of some files, and what is wrong with it."""
    chain = _Chain([], [], Counter())
    for i, part in enumerate(parts):
        own: list[ChainLink] = []
        before: ChainLink | None = None
        for line in lines(part.file):
            if isinstance(line, str):
                chain.faults.append(part.where + line)
                break
            if not own and line.kind == "resumed":
                before = next((one for one in chain.links if one.hash == line.before), None)
                if before is None:
                    chain.faults.append(
                        f"{part.where}it goes on from line {line.number - 1} of another record, "
                        f"with the hash {line.before}: expected the folder of that before this one"
                    )
                    return chain
            elif not own and i:
                chain.faults.append(f"{part.where}it begins a chain of its own: verify it alone")
                return chain
            own.append(ChainLink(line.number, line.before, line.hash))
            chain.last_kind = line.kind
            if line.kind == "resumed":
                chain.targets[str(line.facts.get("head"))] += 1
        if not own and not chain.faults:
            chain.faults.append(f"{part.where}it has no line")
        chain.faults += [part.where + fault for fault in broken(own, before)]
        chain.links += own
    return chain


def _make_again(
    parts: Sequence[_Part], chain: _Chain, replay: ReplayedRun, faults: list[str], notes: list[str]
) -> None:
    """Apply all lines; add their faults and notes."""
    kept: dict[str, tuple[int, Any]] = {}
    for part in parts:
        n_before = n_unsure = len(replay.sent)
        for line in lines(part.file):
            assert isinstance(line, Line), "the chain has been read"
            where = f"{part.where}line {line.number}: "
            try:
                if line.kind == "resumed":
                    _go_back(line, replay, kept, chain.targets)
                if line.kind in {"resumed", "start"}:
                    n_unsure = len(replay.sent)
                replay.apply(line)
                if chain.targets[line.hash]:
                    if len(kept) >= _MOST_KEPT:
                        raise WrongError(f"more than {_MOST_KEPT} lines are gone back to at once")
                    kept[line.hash] = line.number, replay.state()
            except WrongError as problem:
                faults.append(f"{where}{problem}")
                return
            faults += [where + fault for fault in replay.faults]
            notes += [where + note for note in replay.notes]
            if len(faults) >= MOST_FAULTS:
                return
        sent = replay.sent[n_before:]
        faults += [part.where + fault for fault in _strangers(part, sent, n_unsure - n_before)]


def _go_back(
    line: Line, replay: ReplayedRun, kept: dict[str, tuple[int, Any]], targets: Counter[str]
) -> None:
    """Restore the line that a run was resumed from."""
    head, to = str(line.facts.get("head")), line.facts.get("to")
    number, state = kept.get(head, (0, {}))
    if not number or number != to:
        raise WrongError(f"it goes back to line {to!r:.30} with the hash {head:.64}: no such line")
    targets[head] -= 1
    if not targets[head]:
        del kept[head]
    replay.go_back(state if head not in kept else deepcopy(state))


def _strangers(part: _Part, sent: Sequence[tuple[int, float]], n_unsure: int) -> list[str]:
    """Return in words that jobs of a record are not in the run's log of jobs."""
    path = part.folder / EVENTS
    if part.file.name != RECORD or not path.is_file():
        return []
    try:
        events = pq.read_table(path, columns=["node_id", "kind", "sent_at"])
        is_train = np.char.startswith(events["kind"].to_numpy().astype(str), "train")
        nodes = events["node_id"].to_numpy().astype(np.int64).view(np.uint64)[is_train].tolist()
        instants = events["sent_at"].to_numpy().astype(np.float64)[is_train].tolist()
    except (OSError, pa.ArrowException, ValueError, KeyError) as problem:
        raise ProtocolError(f"{path} cannot be read: {problem}") from None
    # A server sees the instant of a message a little later than that of a pick, and the log that
    # a killed one had kept may lack the last jobs.
    is_exact = part.summary().get("executor") != DEPLOYED
    logged = iter(zip(nodes, instants, strict=True))
    first = 0 if is_exact else n_unsure
    for i, (node, now) in enumerate(sent[first:], first):
        if not any(n == node and (t == now or not is_exact) for n, t in logged):
            return [
                f"training job {i + 1} went to node {node} at {now:g} s, and {EVENTS} has no such "
                "job there: nodes were renumbered, or it is the record of another run"
            ]
    return []


def _faults_of_end(chain: _Chain, part: _Part, head: str | None, notes: list[str]) -> list[str]:
    """Find faults at the end of a record; lines cut from there leave the chain whole."""
    own = chain.links[-1].hash
    stated = part.summary().get("record") if part.file.name == RECORD else None
    stated = stated.get("head") if isinstance(stated, dict) else None
    if stated is not None and stated != own:
        return [
            f"{SUMMARY} states the head {stated!s:.64}, and the last line has the hash {own}: "
            "lines were cut or replaced at the end, or it is the record of another run"
        ]
    if head is None and chain.last_kind == "end":
        return []
    if head is None:
        return [
            f"line {chain.links[-1].number} is the last one and not the end of a run: the run goes "
            "on or was killed, or lines were cut at the end; expected the head that was published"
        ]
    if len(head) != len(own):
        raise ConfigError(f"head = {head[:80]!r}: expected {len(own)} hex digits")
    if head.lower() == own:
        return []
    place = next((i for i, link in enumerate(chain.links) if link.hash == head.lower()), None)
    if place is None:
        return [
            f"no line has the hash {head}, and the last one has {own}: lines were cut or replaced, "
            "or it is the record of another run"
        ]
    number, n_after = chain.links[place].number, len(chain.links) - place - 1
    notes.append(f"the head is that of line {number}: it says nothing of the {n_after:,} after it")
    return []


def _faults_of_signature(head: str, signature: Path, key: Path) -> list[str]:
    try:
        proof, shown = (_bytes(path, most) for path, most in ((signature, 10_000), (key, 100_000)))
        public = _public_key(shown)
    except OSError as problem:
        raise ConfigError(f"{problem.filename} cannot be read: {problem.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, EllipticCurvePublicKey):
        raise ConfigError(
            f"key = {str(key)!r}: expected a public ECDSA key in PEM or OpenSSH's form, or a "
            "certificate with one"
        )
    try:
        public.verify(proof, head.lower().encode(), ECDSA(SHA256()))
    except InvalidSignature:
        return [f"{signature} is no signature of the head {head} by the key of {key}"]
    return []


def _bytes(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def _public_key(shown: bytes) -> object:
    if b"BEGIN CERTIFICATE" in shown:
        return x509.load_pem_x509_certificate(shown).public_key()
    return load_pem_public_key(shown) if b"BEGIN" in shown else load_ssh_public_key(shown)
