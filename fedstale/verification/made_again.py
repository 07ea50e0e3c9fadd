"""Selectors made again from what a record says of them: known classes and plain values alone.

A record may come from anyone. It names classes and never imports one: those of fedstale are in a
table, and a user's own is used if whoever verifies has passed it.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import inf
from typing import Any

from fedstale.agents import AgentSelector
from fedstale.agents.policy.scorer import digest, embedded, load
from fedstale.errors import FedstaleError
from fedstale.strategies import selection
from fedstale.strategies.selection import OortSettings, Selector
from fedstale.strategies.selection.base import name_of_class
from fedstale.verification.chain import WrongError

KNOWN: Mapping[str, Callable[..., Any]] = {
    name_of_class(kind): kind
    for kind in (
        selection.Random,
        selection.Fastest,
        selection.PowerOfChoice,
        selection.MostReliable,
        selection.ExpectedUtility,
        selection.LeastAvailable,
        selection.Filtered,
        selection.Probing,
        selection.Credits,
        selection.Oort,
        OortSettings,
        AgentSelector,
    )
}
"""Classes by their names in a record."""
_AGENT = name_of_class(AgentSelector)
_DEEPEST = 8


class UnknownRuleError(Exception):
    """Why picks cannot be made again although the record holds."""


def made_again(
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
