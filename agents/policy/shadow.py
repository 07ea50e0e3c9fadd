"""Run one selector in the shadow of another: what it would have picked, and how those jobs ended.

An operator can so see for days what a trained agent would do, on the real fleet and without risk,
before it decides anything.
"""

import json
import logging
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.strategies.selection import Selector
from fedstale.strategies.server.clients import Candidates
from fedstale.strategies.settings import is_count, require

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One selection: the nodes picked, and those that the watched selector would have picked."""

    now: float
    """Instant in s."""
    n_candidates: int
    """Nodes that could be picked."""
    decided: tuple[int, ...]
    """Ids that the deciding selector picked; jobs were sent to these."""
    watched: tuple[int, ...]
    """Ids that the watched selector would have picked."""

    @property
    def agreement(self) -> float:
        """Share of the decided picks that the watched selector would have made too, or NaN."""
        both = set(self.decided) & set(self.watched)
        return len(both) / len(self.decided) if self.decided else float("nan")


class Shadow(Selector):
    """Lets one selector decide and records what another would have done.

    The watched selector has a random generator of its own and its errors are logged once, so the
    decisions are exactly those of the deciding selector alone.

    Args:
        deciding: picks.
        watching: picks too, without effect.
        path: file to which every choice is added as a line of JSON; None writes none.
        seed: of the watched selector.
        kept: choices that are kept in `choices`, the last ones, >= 1.
    """

    saved = ("deciding", "watching")

    def __init__(
        self,
        deciding: Selector,
        watching: Selector,
        *,
        path: str | Path | None = None,
        seed: int = 0,
        kept: int = 1000,
    ) -> None:
        """Set the selectors."""
        require(is_count(kept), "selector.kept", kept, "an integer >= 1")
        self.deciding, self.watching = deciding, watching
        self.path = path
        self.choices: deque[Choice] = deque(maxlen=kept)
        """The last choices, oldest first."""
        self._rng = np.random.default_rng(seed)
        # Of each decided pick in flight: its node's finished and failed jobs before, and whether
        # both selectors agreed on it.
        self._in_flight: dict[int, tuple[int, int, bool]] = {}
        # Jobs that ended, by whether both agreed on them, and whether they finished.
        self._ended: Counter[tuple[bool, bool]] = Counter()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Shadow(deciding={self.deciding!r}, watching={self.watching!r})"

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Return what the deciding selector picks."""
        self._end(candidates)
        decided = self.deciding.select(candidates, k, now, rng)
        try:
            watched = self.watching.select(candidates, k, now, self._rng)
        except Exception as problem:
            self._warn("the watched selector failed: %s", problem)
            return decided
        choice = Choice(
            now=now,
            n_candidates=len(candidates),
            decided=tuple(decided),
            watched=tuple(int(node) for node in watched),
        )
        self.choices.append(choice)
        self._send(candidates, choice)
        self._write(choice)
        return decided

    def summary(self) -> dict[str, Any]:
        """Return how the two compare so far.

        Returns:
            `choices`; `agreement`, the mean over the kept choices; and for the picks on which both
            agreed and for those that the deciding selector made alone, how many ended and which
            share of them well. If the watched selector is any better, the picks that it would not
            have made end well less often.
        """
        agreements = [c.agreement for c in self.choices if c.decided]
        table: dict[str, Any] = {
            "choices": len(self.choices),
            "agreement": float(np.mean(agreements)) if agreements else float("nan"),
        }
        for name, agreed in (("agreed", True), ("alone", False)):
            finished = self._ended[agreed, True]
            n = finished + self._ended[agreed, False]
            table[f"{name}_ended"] = n
            table[f"{name}_finished_share"] = finished / n if n else float("nan")
        return table

    def _send(self, candidates: Candidates, choice: Choice) -> None:
        """Record the counts from before the jobs of a choice."""
        where = {node: i for i, node in enumerate(candidates.node_ids.tolist())}
        finished, failed = candidates.times_finished, candidates.times_failed
        also = set(choice.watched)
        for node in choice.decided:
            i = where[node]
            self._in_flight[node] = int(finished[i]), int(failed[i]), node in also

    def _end(self, candidates: Candidates) -> None:
        """Count the ends of earlier picks that the candidates' counts now show."""
        if not self._in_flight:
            return
        nodes = np.fromiter(self._in_flight, dtype=np.uint64, count=len(self._in_flight))
        for i in np.flatnonzero(np.isin(candidates.node_ids, nodes)):
            node = int(candidates.node_ids[i])
            finished, failed, agreed = self._in_flight[node]
            has_finished = bool(candidates.times_finished[i] > finished)
            if has_finished or candidates.times_failed[i] > failed:
                self._ended[agreed, has_finished] += 1
                del self._in_flight[node]

    def _write(self, choice: Choice) -> None:
        if self.path is None:
            return
        line = json.dumps(
            {
                "now": choice.now,
                "candidates": choice.n_candidates,
                "decided": choice.decided,
                "watched": choice.watched,
            }
        )
        try:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as problem:
            self._warn("the shadow's choices are not written: %s", problem)

    def _warn(self, text: str, problem: Exception) -> None:
        if text not in self._warned:
            logger.warning(text, problem)
        self._warned.add(text)
