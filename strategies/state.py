"""State that outlives a process: what a class names in `saved` is what a checkpoint holds of it."""

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

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


def _saved(value: object) -> object:
    if isinstance(value, Stateful):
        return value.state_dict()
    return list(value) if isinstance(value, deque) else value
