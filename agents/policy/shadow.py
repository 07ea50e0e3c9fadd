"""Watch one selector while another decides: what it would have picked, and what came of it.

So an operator can see for days what a trained agent would do, on the real fleet and at no risk,
before it decides anything.
"""

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.strategies.selection import Selector
from fedstale.strategies.server.clients import Candidates
from fedstale.strategies.settings import is_count, require

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One selection: who was picked, and who would have been."""

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


@dataclass(slots=True)
class _Tally:
    """Ends of jobs that were seen."""

    finished: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Open:
    """A decided pick whose end has not been seen yet, with the counts from before it."""

    finished: int
    failed: int
    agreed: bool


@dataclass(slots=True)
class _Ends:
    agreed: _Tally = field(default_factory=_Tally)
    alone: _Tally = field(default_factory=_Tally)


class Shadow(Selector):
    """Lets one selector decide and writes down what another would have done.

    The watched selector has a random generator of its own and its errors are logged once, so the
    decisions are exactly those of the deciding selector alone.

    Args:
        deciding: picks.
        watching: is only asked.
        path: file to which every choice is added as a line of JSON; None writes none.
        seed: of the watched selector.
        kept: choices that are kept in `choices`, the last ones, >= 1.
    """

    def __init__(
        self,
        deciding: Selector,
        watching: Selector,
        *,
        path: str | Path | None = None,
        seed: int = 0,
        kept: int = 1000,
    ) -> None:
        """Set who decides and who is watched."""
        require(is_count(kept), "selector.kept", kept, "an integer >= 1")
        self.deciding, self.watching = deciding, watching
        self.path = path
        self.choices: deque[Choice] = deque(maxlen=kept)
        """The last choices, oldest first."""
        self._rng = np.random.default_rng(seed)
        self._open: dict[int, _Open] = {}
        self._ends = _Ends()
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"Shadow(deciding={self.deciding!r}, watching={self.watching!r})"

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Return what the deciding selector picks."""
        self._close(candidates)
        decided = self.deciding.select(candidates, k, now, rng)
        try:
            watched = self.watching.select(candidates, k, now, self._rng)
        except Exception as problem:
            self._tell("the watched selector failed: %s", problem)
            return decided
        choice = Choice(
            now=now,
            n_candidates=len(candidates),
            decided=tuple(decided),
            watched=tuple(int(node) for node in watched),
        )
        self.choices.append(choice)
        self._follow(candidates, choice)
        self._write(choice)
        return decided

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both; choices and their ends are not part of a checkpoint."""
        return {"deciding": self.deciding.state_dict(), "watching": self.watching.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue both."""
        self.deciding.load_state_dict(state["deciding"])
        self.watching.load_state_dict(state["watching"])

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
        for name, ends in (("agreed", self._ends.agreed), ("alone", self._ends.alone)):
            n = ends.finished + ends.failed
            table[f"{name}_ended"] = n
            table[f"{name}_finished_share"] = ends.finished / n if n else float("nan")
        return table

    def _follow(self, candidates: Candidates, choice: Choice) -> None:
        where = {node: i for i, node in enumerate(candidates.node_ids.tolist())}
        finished, failed = candidates.times_finished, candidates.times_failed
        also = set(choice.watched)
        for node in choice.decided:
            i = where[node]
            self._open[node] = _Open(int(finished[i]), int(failed[i]), node in also)

    def _close(self, candidates: Candidates) -> None:
        """Count the ends of earlier picks that the candidates' counts now show."""
        if not self._open:
            return
        nodes = np.fromiter(self._open, dtype=np.uint64, count=len(self._open))
        for i in np.flatnonzero(np.isin(candidates.node_ids, nodes)):
            node = int(candidates.node_ids[i])
            before = self._open[node]
            tally = self._ends.agreed if before.agreed else self._ends.alone
            if candidates.times_finished[i] > before.finished:
                tally.finished += 1
            elif candidates.times_failed[i] > before.failed:
                tally.failed += 1
            else:
                continue
            del self._open[node]

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
            self._tell("the shadow's choices are not written: %s", problem)

    def _tell(self, text: str, problem: Exception) -> None:
        if text not in self._told:
            logger.warning(text, problem)
        self._told.add(text)
