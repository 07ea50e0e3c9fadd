"""A run made again from its record alone: each line changes what is known, and each pick is made.

What the server knew of nodes follows from the lines before, and the generator from the seed. What a
line states besides, such as the number of candidates or of jobs in flight, must agree with that.

Selectors are made of known classes and plain values. A record may come from anyone: it names
classes and never imports one. Those that the text of a strategy may name are known, and a user's
own is used if whoever verifies has passed it.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import Parameter, signature
from math import inf, nan
from sys import float_info
from typing import Any, cast

import numpy as np

from fedstale.agents import AgentSelector
from fedstale.agents.policy import digest, embedded, load
from fedstale.contrib.audit.chain import Line, WrongError
from fedstale.contrib.audit.record import FORMAT, plain_state
from fedstale.errors import FedstaleError
from fedstale.strategies import expression
from fedstale.strategies.pace import Pace
from fedstale.strategies.selection import Exponents, OortSettings, Selector, name_of_class
from fedstale.strategies.types import Forecast, History, NodeIds, SelectionContext

_LEARNT = {
    name: parameter.annotation
    for name, parameter in signature(History.finished).parameters.items()
    if parameter.kind is Parameter.KEYWORD_ONLY
}
"""What a reply says of its node, and of which type it is."""
_STATE = ("_seed", "_history", "_rng", "_candidates", "_jobs", "_picked", "_selector", "has_begun")
_ENDINGS = ("accepted", "rejected", "failed", "timed out", "cancelled")
_CHANCES = ("p_finish", "p_available")
_INFINITE = {"inf": inf, "-inf": -inf}
_MOST_NODES = 10_000_000
_LARGEST = float_info.max
_SHOWN = 6


class Facts:
    """The fields of a line, taken one by one; each is checked, and none may be left over."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Read the fields of a line."""
        self._left = dict(facts)

    def has(self, name: str) -> bool:
        """Return whether there is a field."""
        return name in self._left

    def take(self, name: str, is_right: Callable[[Any], bool], accepted: str) -> Any:
        """Return a field.

        Raises:
            WrongError: it is missing, or not what is accepted.
        """
        if name not in self._left:
            raise WrongError(f"{name} is missing: expected {accepted}")
        value = self._left.pop(name)
        if not is_right(value):
            raise WrongError(f"{name} = {repr(value)[:100]}: expected {accepted}")
        return value

    def count(self, name: str, least: int = 0, most: int = 2**63 - 1) -> int:
        """Return an integer of at least some size."""
        accepted = f"an integer >= {least}" + ("" if most == 2**63 - 1 else f" and <= {most:,}")
        found: int = self.take(name, lambda v: _is_count(v) and least <= v <= most, accepted)
        return found

    def instant(self) -> float:
        """Return the instant, in s."""
        return float(self.take("now", _is_number, "a finite instant in s"))

    def text(self, name: str) -> str:
        """Return a text."""
        found: str = self.take(name, lambda v: isinstance(v, str), "a text")
        return found

    def nodes(self, name: str) -> list[int]:
        """Return distinct ids of nodes, none if they are not there."""
        if name not in self._left:
            return []
        found: list[int] = self.take(
            name,
            lambda v: isinstance(v, list) and all(map(_is_node, v)) and len(set(v)) == len(v),
            "distinct ids of nodes",
        )
        return found

    def node(self) -> int:
        """Return the id of the node."""
        found: int = self.take("node", _is_node, "the id of a node")
        return found

    def done(self) -> None:
        """Raise WrongError if a field is left."""
        if self._left:
            raise WrongError(f"{', '.join(sorted(self._left))[:200]}: no such field of this line")


class ReplayedRun:
    """The server of a run, as far as its picks depend on it."""

    def __init__(self, own: Sequence[type[Selector]] = (), agent: str | None = None) -> None:
        """Start before the first line; arguments as of `rebuilt_selector`."""
        self._own, self._agent = own, agent
        self.n_picks = self.n_made = 0
        """Picks so far, and those of them that were made again."""
        self.why_not = ""
        """Why some could not be."""
        self.sent: list[tuple[int, float]] = []
        """Node and instant of each job that was sent."""
        self.faults: list[str] = []
        """What is wrong with the line that was applied last, if what follows can still be read."""
        self.notes: list[str] = []
        """What is worth a look in it."""
        self.has_begun = self.has_ended = False

    def apply(self, line: Line) -> None:
        """Apply one line.

        Raises:
            WrongError: it cannot be, and what follows can neither.
        """
        self.faults, self.notes = [], []
        facts = Facts(line.facts)
        apply = _KINDS.get(line.kind)
        if apply is None:
            raise WrongError(f"kind = {line.kind[:100]!r}: expected one of {', '.join(_KINDS)}")
        if not self.has_begun and line.kind != "start":
            raise WrongError(f"expected the beginning of a run, and not kind = {line.kind!r}")
        if self.has_ended and line.kind not in {"start", "resumed", "settings"}:
            raise WrongError("the run had ended in the line before")
        self.has_ended = line.kind == "end"
        apply(self, facts)
        facts.done()

    def state(self) -> dict[str, Any]:
        """Return all that decides what follows."""
        return deepcopy({name: getattr(self, name) for name in _STATE})

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    # Beginning and going on.

    def _start(self, facts: Facts) -> None:
        version = facts.count("format", 1)
        if version != FORMAT:
            raise WrongError(
                f"format = {version}: this release reads {FORMAT}; verify with a later fedstale"
            )
        for name in ("fedstale", "python", "numpy"):
            facts.text(name)
        self._seed = facts.count("seed", 0, 2**128)
        facts.instant()
        if self.has_begun:
            self.notes.append("a strategy begins anew, and nothing is known of any node")
        self.has_begun = True
        self._history = History()
        self._rng = np.random.default_rng(self._seed)
        self._candidates: NodeIds = np.zeros(0, dtype=np.uint64)
        self._jobs: dict[int, int] = {}
        self._picked: list[int] = []
        self._selector: Selector | None = None
        self._settle(facts)

    def _settings(self, facts: Facts) -> None:
        facts.instant()
        self.notes.append("the run goes on with other settings")
        before = self._selector
        self._settle(facts)
        if before is not None and self._selector is not None:
            self._selector.load_state_dict(before.state_dict())

    def _resumed(self, facts: Facts) -> None:
        """Go on from an earlier line, whose state whoever calls has put in place."""
        to = facts.count("to", 1)
        facts.text("head")
        self.notes.append(f"the server has gone back to line {to}, a checkpoint")
        if facts.has("selector"):
            self._settings(facts)
        else:
            facts.instant()

    def _settle(self, facts: Facts) -> None:
        facts.text("strategy")
        settings = facts.take("settings", lambda v: isinstance(v, dict), "a strategy's settings")
        described = facts.take("selector", lambda v: isinstance(v, dict), "a selector")
        try:
            self._selector = rebuilt_selector(described, self._own, self._agent)
            is_asked = "concurrency" in settings and "pace" not in settings
            if is_asked and isinstance(self._selector, Pace):
                raise UnknownRuleError("the selector is the pace too, by what no line has")
        except UnknownRuleError as problem:
            self._selector, self.why_not = None, str(problem)

    def _end(self, facts: Facts) -> None:
        facts.text("how")
        facts.text("reason")
        facts.count("version")

    # Picks.

    def _pick(self, facts: Facts) -> None:
        now, k = facts.instant(), facts.count("k", 1)
        self._change_candidates(facts.nodes("joined"), facts.nodes("left"))
        n, n_out = facts.count("candidates", 1), facts.count("in_flight")
        deadline = facts.take("deadline_s", lambda v: v == "inf" or _is_length(v), "seconds >= 0")
        size, missing = facts.count("buffer_size"), facts.count("missing")
        keeps = facts.take("keeps_stragglers", lambda v: isinstance(v, bool), "true or false")
        version, state = facts.count("version"), facts.take("rng", _is_state, "a generator's state")
        picks = facts.nodes("picks")
        if n != self._candidates.size:
            self.faults.append(f"{n} candidates, and {self._candidates.size} by the lines before")
        if n_out != len(self._jobs):
            self.faults.append(f"{n_out} jobs in flight, and {len(self._jobs)} by the lines before")
        if self._picked:
            self.faults.append(f"the picks before, {_shown(self._picked)}, were never sent")
        if not np.isin(np.array(picks, dtype=np.uint64), self._candidates).all() or len(picks) > k:
            self.faults.append(
                f"picks {_shown(picks)}, which are not at most {k} of the candidates"
            )
        if busy := set(picks) & set(self._jobs.values()):
            self.faults.append(f"picks {_shown(sorted(busy))}, which have a job in flight")
        self.n_picks += 1
        self._picked = picks
        context = SelectionContext(
            n_in_flight=n_out,
            buffer_size=size,
            n_missing=missing,
            keeps_stragglers=keeps,
            version=version,
            deadline_s=_number(deadline),
        )
        self._make(k, now, context, state, picks)

    def _make(
        self, k: int, now: float, context: SelectionContext, state: Sequence[Any], picks: list[int]
    ) -> None:
        """Make a pick, and compare."""
        if self._selector is None:
            return
        if plain_state(self._rng.bit_generator.state) != state:
            self.faults.append("the state of the generator is not the one that the seed leads to")
            self._rng.bit_generator.state = {
                "bit_generator": "PCG64",
                "state": {"state": int(state[0], 16), "inc": int(state[1], 16)},
                "has_uint32": state[2],
                "uinteger": state[3],
            }
        candidates = self._history.candidates(self._candidates, context, self._nodes_out)
        try:
            made = [int(i) for i in self._selector.select(candidates, k, now, self._rng)]
        except Exception as problem:  # whatever hostile numbers lead to
            raise WrongError(
                f"the selector raises {type(problem).__name__} ({problem})"[:300]
            ) from None
        self.n_made += 1
        if made != picks:
            self.faults.append(f"picks {_shown(picks)}, and {_shown(made)} when made again")

    def _nodes_out(self) -> NodeIds:
        return np.unique(np.array([*self._jobs.values()], dtype=np.uint64))

    def _change_candidates(self, joined: list[int], left: list[int]) -> None:
        before = self._candidates
        new, gone = np.array(joined, dtype=np.uint64), np.array(left, dtype=np.uint64)
        if np.isin(new, before).any():
            raise WrongError("joined has a node that was a candidate already")
        if not np.isin(gone, before).all():
            raise WrongError("left has a node that was no candidate")
        kept = before[~np.isin(before, gone)] if gone.size else before
        self._candidates = np.insert(kept, np.searchsorted(kept, np.sort(new)), np.sort(new))

    def _evaluate(self, facts: Facts) -> None:
        n = facts.count("online", 1, _MOST_NODES)
        self._rng.choice(n, facts.count("k", 1, n), replace=False)

    # Jobs.

    def _sent(self, facts: Facts) -> None:
        now, job = facts.instant(), facts.count("job")
        nodes, unsent = facts.nodes("nodes"), facts.nodes("unsent")
        if nodes != self._picked:
            self.faults.append(
                f"jobs go to {_shown(nodes)}, and {_shown(self._picked)} were picked"
            )
        self._picked = []
        for node in nodes:
            self._history.picked(node, now)
            self.sent.append((node, now))
            if node in unsent:
                self._history.failed(node)
                continue
            if job in self._jobs:
                raise WrongError(f"job {job} is in flight already")
            self._jobs[job] = node
            job += 1

    def _heard(self, facts: Facts) -> None:
        node, now = facts.node(), facts.instant()
        accepted = "numbers, or lists of numbers, by name"
        forecast: Forecast = {
            name: [_number(one) for one in value] if isinstance(value, list) else float(value)
            for name, value in facts.take("forecast", _is_forecast, accepted).items()
        }
        for name in _CHANCES:
            chance = forecast.get(name, 0.0)
            if isinstance(chance, float) and not 0.0 <= chance <= 1.0:
                self.notes.append(
                    f"node {node} states {name} = {chance:g}, and the server takes it as "
                    f"{min(max(chance, 0.0), 1.0):g}"
                )
        self._history.forecast(node, forecast, now)

    def _stated(self, facts: Facts) -> None:
        stated = facts.take("properties", _are_properties, "texts and numbers by name")
        self._history.stated(facts.node(), stated)

    def _ended(self, facts: Facts) -> None:
        job, node = facts.count("job"), facts.node()
        how = facts.take("how", lambda v: v in _ENDINGS, f"one of {', '.join(_ENDINGS)}")
        if facts.has("reason"):
            facts.text("reason")
        if self._jobs.get(job) != node:
            raise WrongError(f"job {job} of node {node} is not in flight")
        del self._jobs[job]
        if how == "accepted" or (how == "rejected" and facts.has("duration_s")):
            learnt: dict[str, Any] = {
                name: facts.count(name)
                if kind is int
                else _number(facts.take(name, _is_maybe, "a number, null for unknown"))
                for name, kind in _LEARNT.items()
            }
            self._history.finished(node, **learnt)
        elif how != "cancelled":
            self._history.failed(node)

    def _left_out(self, facts: Facts) -> None:
        facts.count("job")
        facts.text("reason")


_KINDS: Mapping[str, Callable[[ReplayedRun, Facts], None]] = {
    "start": ReplayedRun._start,
    "settings": ReplayedRun._settings,
    "resumed": ReplayedRun._resumed,
    "heard": ReplayedRun._heard,
    "stated": ReplayedRun._stated,
    "pick": ReplayedRun._pick,
    "evaluate": ReplayedRun._evaluate,
    "sent": ReplayedRun._sent,
    "ended": ReplayedRun._ended,
    "left-out": ReplayedRun._left_out,
    "end": ReplayedRun._end,
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_node(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_LARGEST <= value <= _LARGEST


def _is_length(value: object) -> bool:
    return _is_number(value) and cast(float, value) >= 0


def _is_maybe(value: object) -> bool:
    return value is None or value in ("inf", "-inf") or _is_number(value)


def _is_forecast(value: object) -> bool:
    return isinstance(value, dict) and all(
        all(map(_is_maybe, one)) if isinstance(one, list) else _is_number(one)
        for one in value.values()
    )


def _are_properties(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, str | bool) or _is_number(one) for one in value.values()
    )


def _is_state(value: object) -> bool:
    """Return whether a value is the state of NumPy's default generator."""
    if not isinstance(value, list) or len(value) != len(("state", "inc", "has_uint32", "uinteger")):
        return False
    try:
        words = [int(word, 16) for word in value[:2]]
    except (TypeError, ValueError):
        return False
    is_left = all(map(_is_count, value[2:])) and value[2] in (0, 1) and 0 <= value[3] < 2**32
    return is_left and all(0 <= word < 2**128 for word in words)


def _number(value: object) -> float:
    if value is None:
        return nan
    return _INFINITE[value] if isinstance(value, str) else float(value)  # type: ignore[arg-type]


def _shown(nodes: Sequence[int]) -> str:
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"[{', '.join(map(str, nodes[:_SHOWN]))}{more}]"


KNOWN: Mapping[str, Callable[..., Any]] = {
    name_of_class(kind): kind
    for kind in expression.classes()
    if issubclass(kind, (Selector, OortSettings, Exponents))
}
"""Classes by their names in a record."""
_AGENT = name_of_class(AgentSelector)
_DEEPEST = 8


class UnknownRuleError(Exception):
    """Why picks cannot be made again although the record holds."""


def rebuilt_selector(
    described: object, own: Sequence[type[Selector]] = (), agent: str | None = None
) -> Selector:
    """Return a selector as it was when a run began.

    Args:
        described: what `Selector.described` returned, as read from a record.
        own: classes that it may be besides those of fedstale.
        agent: folder of an agent that it may be; None for the embedded one.

    Raises:
        WrongError: it is no description, or its settings are out of range.
        UnknownRuleError: another process cannot make it.
    """
    known = dict(KNOWN)
    known.update((name_of_class(kind), kind) for kind in own)
    made = _made(described, known, agent, 0)
    if not isinstance(made, Selector):
        raise WrongError("selector: expected a selector and not its settings alone")
    return made


def _made(
    described: object, known: Mapping[str, Callable[..., Any]], agent: str | None, depth: int
) -> object:
    if not isinstance(described, dict) or depth > _DEEPEST:
        raise WrongError("selector: expected a class and its settings")
    name, settings = described.get("class"), described.get("settings")
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise WrongError("selector: expected a class and its settings")
    make = known.get(name)
    if make is None:
        raise UnknownRuleError(
            f"the selector is {name[:200]!r}, which is not of fedstale: pass its class, such as "
            "--selector my_module:MySelector"
        )
    parameters = signature(make).parameters
    values = {}
    for key, value in settings.items():
        if key not in parameters:
            raise WrongError(f"selector: {name} has no setting {key[:200]!r}")
        if isinstance(value, dict) and value.keys() == {"opaque"}:
            raise UnknownRuleError(
                f"the selector {name} has a setting {key!r} ({str(value['opaque'])[:100]}) that no "
                "other process can make again"
            )
        if isinstance(value, list):
            raise WrongError(f"selector: {name}.{key}: expected a number, a text or settings")
        nested = isinstance(value, dict)
        values[key] = _made(value, known, agent, depth + 1) if nested else _value(value)
    if name == _AGENT or "weights" in described:
        values["path"] = agent
        _check_agent(described.get("weights"), agent)
    try:
        return make(**values)
    except Exception as problem:  # whatever hostile settings lead to
        raise WrongError(f"selector: {name} cannot be made ({problem})"[:300]) from None


def _value(value: object) -> object:
    return inf if value == "inf" else value


def _check_agent(weights: object, agent: str | None) -> None:
    """Check that the agent at hand is the one of the record, by its weights."""
    try:
        found = digest(load(embedded() if agent is None else agent).weights)
    except FedstaleError as problem:
        raise UnknownRuleError(f"the agent cannot be read: {problem}") from None
    if found != weights:
        at_hand = "the embedded one" if agent is None else f"the one in {agent!r}"
        raise UnknownRuleError(
            f"the agent has weights {str(weights)[:64]}, and {at_hand} has {found}: pass its "
            "folder by --agent"
        )
