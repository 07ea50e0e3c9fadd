"""What parts of a strategy have in common: checked settings, a repr, state that is saved."""

from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, ClassVar

from fedstale.errors import ConfigError

State = dict[str, Any]
"""Nested dicts, lists and tuples; leaves are arrays, numbers, text, bool or None."""


class Stateful:
    """Saves and restores the attributes that its class names.

    A value may be anything that a `State` holds, a deque, or another `Stateful`, which is saved by
    its own names. What follows from other attributes is not named; a class that has such attributes
    works them out again in `load_state_dict`, after calling this one.

    Example:
        >>> class Mean(Stateful):
        ...     saved = ("total", "n")
        ...
        ...     def __init__(self) -> None:
        ...         self.total, self.n = 0.0, 0
        >>> one, two = Mean(), Mean()
        >>> one.total, one.n = 6.0, 4
        >>> two.load_state_dict(one.state_dict())
        >>> two.total / two.n
        1.5
    """

    __slots__ = ()

    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint holds."""

    def state_dict(self) -> State:
        """Return what a checkpoint must hold; arrays are not copied."""
        return {name: _saved(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, which stays as it is.

        Dicts and deques are filled anew: others may look at the same objects.
        """
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, Stateful):
                value.load_state_dict(state[name])
            elif isinstance(value, dict):
                value.clear()
                value.update(deepcopy(state[name]))
            elif isinstance(value, deque):
                value.clear()
                value.extend(state[name])
            else:
                setattr(self, name, deepcopy(state[name]))


class Part(Stateful):
    """Shows itself as it was made: with the arguments of its constructor that are attributes.

    Example:
        >>> class Mean(Part):
        ...     def __init__(self, source: str, *, decay: float = 0.9) -> None:
        ...         self.source, self.decay = source, decay
        >>> Mean("loss")
        Mean('loss', decay=0.9)
    """

    def __repr__(self) -> str:
        shown = []
        for name, parameter in signature(type(self)).parameters.items():
            value = getattr(self, name, Parameter.empty)
            is_named = parameter.default is not Parameter.empty
            is_named |= parameter.kind is Parameter.KEYWORD_ONLY
            if value is not Parameter.empty:
                shown.append(f"{name}={value!r}" if is_named else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"


def _saved(value: object) -> object:
    if isinstance(value, Stateful):
        return value.state_dict()
    return list(value) if isinstance(value, deque) else value


def require(holds: bool, field: str, value: object, accepted: str) -> None:
    """Raise unless a setting is acceptable.

    Args:
        holds: whether it is.
        field: its name as the user wrote it.
        value: what it was set to.
        accepted: what would be accepted, and what to do.

    Raises:
        ConfigError: it is not.

    Example:
        >>> require(False, "buffer_size", 0, "an integer >= 1")
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.buffer_size = 0: expected an integer >= 1
    """
    if not holds:
        raise ConfigError(f"strategy.{field} = {value!r}: expected {accepted}")


def require_count(
    field: str, value: object, accepted: str = "an integer >= 1", *, least: int = 1
) -> None:
    """Raise ConfigError unless a setting is an integer (and no bool) of at least some size."""
    require(is_count(value, least), field, value, accepted)


def require_choice(field: str, value: object, *choices: str) -> None:
    """Raise ConfigError unless a setting is one of some words."""
    require(value in choices, field, value, "|".join(choices))


def require_known(
    name: str, known: Iterable[str], owner: str, parts: Mapping[str, Iterable[str]]
) -> None:
    """Raise unless a setting exists, and name the part that has it or the nearest one there is.

    Args:
        name: of the setting, as the user wrote it.
        known: settings that exist.
        owner: what they belong to.
        parts: settings of its parts, by the text of each part, such as "schedule=Schedule".

    Raises:
        ConfigError: it does not exist.

    Example:
        >>> require_known("bufer_size", ["concurrency", "buffer_size"], "FedBuff", {})
        Traceback (most recent call last):
        fedstale.errors.ConfigError: FedBuff has no setting 'bufer_size': expected 'buffer_size'
    """
    names = list(known)
    if name not in names:
        near = [f"{part}({name}=...)" for part, settings in parts.items() if name in settings]
        near += map(repr, get_close_matches(name, names, n=1))
        accepted = near[0] if near else f"one of {', '.join(names)}"
        raise ConfigError(f"{owner} has no setting {name!r}: expected {accepted}")


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer (and no bool) of at least some size."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
