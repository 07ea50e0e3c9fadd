"""The trained agent as a `Selector`: it scores all candidates at once and draws k by the scores.

It needs NumPy alone. Whatever is wrong with its files or its numbers, a run goes on: one line of
the log says so, and the heuristic that the agent was trained to beat decides instead.

`Shadow` runs one selector in the shadow of another: what it would have picked, and how those jobs
ended. An operator can so see for days what a trained agent would do, on the real fleet and without
risk, before it decides anything.
"""

import json
import logging
from collections import Counter, deque
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.agents.policy.features import Inputs, features
from fedstale.agents.policy.scorer import Agent, Floats, digest, drawn, embedded, load, score
from fedstale.errors import FedstaleError
from fedstale.strategies.selection import (
    BALANCED,
    SURE,
    ExpectedUtility,
    Selector,
    enough,
    name_of_class,
)
from fedstale.strategies.types import Candidates, is_count, require
from fedstale.traces import Index, Mask

logger = logging.getLogger(__name__)

# Time limits of the jobs that agents are trained on are 3 to 8 times what the median device takes.
_PATIENCE = 5.0


def top(scores: Floats, k: int, rng: np.random.Generator) -> Index:
    """Return the positions of the k largest scores, in falling order; chance breaks ties.

    Very many scores are not sorted.

    Args:
        scores: finite; shape (n,).
        k: how many; all if there are fewer.
        rng: of the choice among the scores equal to the least one that is picked.

    Example:
        >>> top(np.array([1.0, 3.0, 2.0]), 2, np.random.default_rng(0)).tolist()
        [1, 2]
    """
    n = scores.size
    if k <= 0:
        return np.zeros(0, dtype=np.int64)
    if k >= n:
        chosen = rng.permutation(n)
    else:
        least = scores[np.argpartition(scores, n - k)[n - k]]
        better = np.flatnonzero(scores > least)
        equal = np.flatnonzero(scores == least)
        chosen = np.concatenate([better, rng.choice(equal, k - better.size, replace=False)])
    return chosen[np.argsort(-scores[chosen], kind="stable")].astype(np.int64)


class AgentSelector(Selector):
    """Draws candidates by the scores of a trained agent, see `fedstale.agents.policy.scorer`.

    Args:
        path: folder of agent.toml and agent.safetensors, or an agent; None takes the one that comes
            with fedstale.
        exploration: share of the picks that goes to candidates never picked before, by chance (to
            all candidates where there are none), in [0, 1].
        fairness: share of the picks that goes to those picked least often, in [0, 1].
        sure: chance in (0, 1] that the next server step gets what it still misses, where jobs that
            are late for it are cancelled: no more are sent than that takes, see `Enough`; 1 sends
            all that is asked for.

    Example:
        >>> nodes = Candidates.of([7, 8, 9], forecast_p_finish=[0.1, 0.9, 0.5])
        >>> sorted(AgentSelector().select(nodes, 2, 0.0, np.random.default_rng(0)))
        [8, 9]
    """

    def __init__(
        self,
        path: str | Path | Agent | None = None,
        *,
        exploration: float = 0.0,
        fairness: float = 0.0,
        sure: float = SURE,
    ) -> None:
        """Read the agent; one that cannot be read is replaced by the heuristic, see the module."""
        require(0 <= exploration <= 1, "selector.exploration", exploration, "a share in [0, 1]")
        require(
            0 <= fairness <= 1 - exploration,
            *("selector.fairness", fairness, "a share in [0, 1 - exploration]"),
        )
        require(0 < sure <= 1, "selector.sure", sure, "a chance in (0, 1]")
        self.path, self.exploration, self.fairness = path, exploration, fairness
        self.sure = sure
        self._heuristic = ExpectedUtility(BALANCED)
        self._agent: Agent | None = None
        self._warned = False
        try:
            self._agent = path if isinstance(path, Agent) else load(path or embedded())
        except FedstaleError as problem:
            self._warn(str(problem))

    def described(self) -> dict[str, Any]:
        """Return its settings, and which agent it is by the digest of its weights."""
        if self._agent is None:
            return self._heuristic.described()
        settings = {
            "exploration": self.exploration,
            "fairness": self.fairness,
            "sure": self.sure,
        }
        name = name_of_class(type(self))
        return {"class": name, "settings": settings, "weights": digest(self._agent.weights)}

    @property
    def falls_back(self) -> bool:
        """Whether the agent could not be read, so that the heuristic decides."""
        return self._agent is None

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Draw as many as the next server step is likely to need; the rule decides alone."""
        if self._agent is None:
            return self._heuristic.select(candidates, k, now, rng)
        return enough(candidates, now, self.sure, lambda: self._drawn(candidates, k, now, rng))

    def _drawn(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick the shares for exploration and fairness, and draw the others, the best first."""
        k = min(k, len(candidates))
        scores = self.scores(candidates, k, now)
        if scores is None:
            return self._heuristic.select(candidates, k, now, rng)
        free = np.ones(len(candidates), dtype=np.bool_)
        parts: list[Index] = []
        picked = candidates.times_picked
        n_explore = _share(self.exploration * k, rng)
        n_fair = min(_share(self.fairness * k, rng), k - n_explore)
        for n, wanted in ((n_explore, np.minimum(picked, 1)), (n_fair, picked)):
            if n:
                part = _of(free, -wanted.astype(np.float64), n, rng)
                free[part] = False
                parts.append(part)
        best = _of(free, drawn(scores, rng), k - n_explore - n_fair, rng)
        chosen = best
        for part in parts:
            # Whichever are kept of all, a share of them is these.
            chosen = np.insert(chosen, rng.integers(chosen.size + 1, size=part.size), part)
        return [int(node) for node in candidates.node_ids[chosen]]

    def scores(self, candidates: Candidates, k: int, now: float) -> Floats | None:
        """Return the score of every candidate, shape (n,), or None where the agent has none.

        Args:
            candidates: nodes that may be picked.
            k: how many are to be picked.
            now: the instant in s.
        """
        if self._agent is None:
            return None
        given = inputs_of(candidates, k, now)
        scores = score(self._agent.weights, *(values[0] for values in given))
        if np.isfinite(scores).all():
            return scores
        self._warn(
            f"{np.count_nonzero(~np.isfinite(scores))} of {scores.size} scores are no numbers"
        )
        return None

    def _warn(self, problem: str) -> None:
        if not self._warned:
            logger.warning("the agent is not used, the balanced rule decides: %s", problem)
        self._warned = True


def inputs_of(candidates: Candidates, k: int, now: float) -> Inputs:
    """Return the inputs of one choice, as an agent is given them.

    Args:
        candidates: nodes that may be picked.
        k: how many are to be picked.
        now: the instant in s.
    """
    at = candidates.context
    return features(
        candidates,
        np.ones((1, len(candidates)), dtype=np.bool_),
        now=now,
        k=k,
        n_in_flight=at.n_in_flight,
        version=at.version,
        n_missing=at.n_missing,
        n_expected=float(candidates.in_flight.p_finish.sum()),
        # Training always has a limit.
        deadline_s=at.deadline_s if isfinite(at.deadline_s) else _patience(candidates),
    )


def _patience(candidates: Candidates) -> float:
    """Return a time limit in s that fits the candidates, inf if no duration is known."""
    durations = candidates.duration_s
    known = durations[np.isfinite(durations)]
    if not known.size:
        forecast = candidates.forecast_duration_s
        known = forecast[np.isfinite(forecast)]
    return _PATIENCE * float(np.median(known)) if known.size else inf


def _share(expected: float, rng: np.random.Generator) -> int:
    """Return a whole number with this mean, so that a small share of few picks is not lost."""
    if not isfinite(expected) or expected <= 0:
        return 0
    return int(expected + rng.random())


def _of(free: Mask, scores: Floats, n: int, rng: np.random.Generator) -> Index:
    """Return the n best of those that are free."""
    if free.all():
        return top(scores, n, rng)
    where = np.flatnonzero(free)
    return where[top(scores[where], n, rng)]


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
        kept: choices that are kept in `choices`, the last ones, >= 1.
    """

    saved = ("deciding", "watching")

    def __init__(
        self,
        deciding: Selector,
        watching: Selector,
        *,
        path: str | Path | None = None,
        kept: int = 1000,
    ) -> None:
        """Set the selectors."""
        require(is_count(kept), "selector.kept", kept, "an integer >= 1")
        self.deciding, self.watching = deciding, watching
        self.path = path
        self.choices: deque[Choice] = deque(maxlen=kept)
        """The last choices, oldest first."""
        self._rng = np.random.default_rng(0)
        # Of each decided pick in flight: its node's finished and failed jobs before, and whether
        # both selectors agreed on it.
        self._in_flight: dict[int, tuple[int, int, bool]] = {}
        # Jobs that ended, by whether both agreed on them, and whether they finished.
        self._ended: Counter[tuple[bool, bool]] = Counter()
        self._warned: set[str] = set()

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

    def described(self) -> dict[str, Any]:
        """Return what the deciding selector does: the watched one changes no pick."""
        return self.deciding.described()

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
