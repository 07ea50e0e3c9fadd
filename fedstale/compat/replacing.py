"""Ways to put one thing in the place of another for the time of a run, and to put it back.

A function is replaced under every name that modules of the app have bound it to. A type is not
replaced: some of its methods are, so that it stays the type that it is, wherever it was imported,
subclassed or asked for by `isinstance`.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def replaced(stand_ins: Sequence[tuple[Any, Any]], within: Sequence[str]) -> Iterator[None]:
    """Put functions in the place of others wherever modules of some packages have bound these.

    Args:
        stand_ins: each function or class with its stand-in.
        within: names of packages or modules; with their sub-modules.
    """
    prefixes = tuple(f"{package}." for package in within)
    wanted = {id(original): (original, stand_in) for original, stand_in in stand_ins}
    bound = [
        (module, name, *wanted[id(value)])
        for path, module in list(sys.modules.items())
        if module is not None and f"{path}.".startswith(prefixes)
        for name, value in list(vars(module).items())
        if id(value) in wanted
    ]
    try:
        for module, name, _, stand_in in bound:
            setattr(module, name, stand_in)
        yield
    finally:
        for module, name, original, _ in bound:
            setattr(module, name, original)


@contextmanager
def wrapped(owner: object, names: Sequence[str], around: Callable[..., Any]) -> Iterator[None]:
    """Put a function around methods of one object; it is given the method first.

    Args:
        owner: the object, which has none of its own by these names.
        names: of the methods.
        around: called with a method and its arguments in the method's place.
    """
    for name in names:
        setattr(owner, name, partial(around, getattr(owner, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(owner, name)


@contextmanager
def changed(kind: type, methods: Mapping[str, Any]) -> Iterator[None]:
    """Give a type other methods, also one that is written in C and lets nobody set them.

    Args:
        kind: the type, as CPython makes types: with a dict of its own.
        methods: in the place of the type's own by these names, where it has them.
    """
    (names,) = gc.get_referents(vars(kind))
    methods = {name: method for name, method in methods.items() if name in names}
    before = {name: names[name] for name in methods}

    def put(ours: Mapping[str, Any]) -> None:
        names.update(ours)
        # What Python remembers of the type's attributes.
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    try:
        put(methods)
        yield
    finally:
        put(before)
