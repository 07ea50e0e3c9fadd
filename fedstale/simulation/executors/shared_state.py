"""What the clients of an app share in their process, and would not in processes of their own."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np

_MOST = 10_000
"""Entries of a container that are looked at."""
_FRAMEWORKS = ("torch", "tensorflow.random", "keras.random")


class SharedState:
    """Finds globals of an app's modules by which one client changes what the next does.

    Those are generators of random numbers, numbers and texts that change, and entries of
    containers that are replaced. What is made once and kept, such as a dataset that is loaded by
    the first client or a cache that only grows, is none.
    """

    def __init__(self, modules: Callable[[], Iterable[str]]) -> None:
        """Look at nothing yet.

        Args:
            modules: returns the names of the app's own modules.
        """
        self._modules = modules
        self._before: dict[tuple[str, str], Any] = {}

    def look(self) -> str:
        """Return the name of something that is shared, such as "task.rng"; empty for nothing yet.

        Whatever has changed since the last look, in which clients have run, is shared.
        """
        now: dict[tuple[str, str], Any] = {}
        for module, name, value in self._globals():
            if isinstance(value, _generators()):
                return f"{module}.{name}"
            kept = _kept(value)
            before = self._before.get((module, name))
            if before is not None and _is_changed(before, kept):
                return f"{module}.{name}"
            if kept is not None:
                now[module, name] = kept
        self._before = now
        return ""

    def _globals(self) -> Iterator[tuple[str, str, Any]]:
        for module in self._modules():
            for name, value in list(vars(sys.modules.get(module, ModuleType(module))).items()):
                if not name.startswith("__"):
                    yield module, name, value


def _generators() -> tuple[type, ...]:
    """Return the classes of generators of random numbers, of libraries that are loaded."""
    found = [getattr(sys.modules.get(name), "Generator", None) for name in _FRAMEWORKS]
    return (
        *(np.random.Generator, np.random.RandomState, random.Random),
        *(one for one in found if isinstance(one, type)),
    )


def _kept(value: object) -> Any:  # noqa: ANN401 - of any kind
    """Return what tells whether a global has changed; None for what cannot tell."""
    if isinstance(value, Number | str):
        return value
    if isinstance(value, Mapping) and len(value) <= _MOST:
        return dict(value)
    if isinstance(value, Sequence) and len(value) <= _MOST:
        return dict(enumerate(value))
    return None


def _is_changed(before: Any, now: Any) -> bool:  # noqa: ANN401 - as kept
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return type(before) is not type(now) or before != now
    return any(key in before and before[key] is not value for key, value in now.items())
