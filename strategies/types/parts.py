"""What parts of a strategy have in common: checked arguments, a repr, state that is saved."""

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any, ClassVar

from fedstale.strategies.types.checked import Checked

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
        """Return the state for a checkpoint; arrays are not copied."""
        return {name: _saved(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, which stays as it is.

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


class Part(Checked, Stateful):
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
