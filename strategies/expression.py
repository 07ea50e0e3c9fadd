"""A strategy as text, for run configs and plans: `FedBuff(20, 5, selector=Oort())`.

It is written as in Python, of literals and of names of this package: the methods, their parts and
the stages, and `flower.FedAvg(...)` for a strategy of Flower's. Nothing else is evaluated. Other
packages add names by entry points of the group `fedstale.strategies`, as fedstale's agents do.
"""

import ast
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from inspect import BoundArguments, isabstract, isroutine, signature
from math import inf
from pathlib import Path
from types import ModuleType
from typing import get_args

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedstale.errors import ConfigError, FedstaleError, not_loaded
from fedstale.strategies import (
    methods,
    pace,
    robust,
    schedule,
    selection,
    server,
    server_optimizer,
    stages,
    weighting,
)
from fedstale.strategies.server import StaleStrategy
from fedstale.strategies.types import require_known, shown

GROUP = "fedstale.strategies"
"""Entry points that add names, each of a class or a function that makes a part."""
_ROOMS = {
    room.__name__.rpartition(".")[2]: room
    for room in (methods, selection, schedule, pace, weighting, robust, server_optimizer, stages)
}
_BASES = (
    *(Strategy, selection.Selector, weighting.Weighting, robust.Rule, stages.Stage),
    *(pace.Pace, server_optimizer.ServerOptimizer),
)
_SETTINGS = (schedule.Schedule, selection.OortSettings, selection.Exponents)
_MOST_TEXT, _MOST_DEEP, _MOST_NUMBER = 10_000, 100, 2**64
"""Characters of a text, nodes in nodes of what it says, and whole numbers in it: beyond, to read or
to show it would take long, or more of the stack than there is."""
_EXAMPLE = "expected a strategy such as 'FedBuff(20, 5)'"


class _UnreadableError(Exception):
    """A text that describes no strategy, and why."""


def parse(text: str, **settings: object) -> Strategy:
    """Return the strategy that a text describes.

    Args:
        text: the call of a method, such as "FedBuff(20, 5, stages=[Compression('int8')])".
        **settings: more options of `StaleStrategy`, which the text must not repeat; those that are
            None are left out. A strategy of Flower's has no seed, and takes no other that is set.

    Raises:
        ConfigError: the text is no such call, a name or an argument is unknown (the nearest one is
            named), an argument is out of range, or Flower's strategy lacks a setting.

    Example:
        >>> parse("GapAware(20, 5, of='layer')", seed=1)  # doctest: +NORMALIZE_WHITESPACE
        GapAware(concurrency=20, buffer_size=5, send='after_reply', stragglers='keep',
        weighting=Gap(of='layer', decay=0.97), normalise='buffer_size', seed=1)
    """
    log = logging.getLogger("flwr")
    log.addFilter(_is_news)
    try:
        return _strategy(text, {k: v for k, v in settings.items() if v is not None})
    except _UnreadableError as problem:
        raise ConfigError(f"strategy = {shown(text)}: {problem}") from problem.__cause__
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Pass all warnings but Flower's of a setting that the text itself states."""
    return not record.getMessage().startswith("fraction_evaluate is set to 0.0")


def with_arguments(text: str, arguments: Mapping[str, object]) -> str:
    """Return a text with arguments of its outermost call set, as a search does.

    Args:
        text: the call of a method.
        arguments: values by name; one that is a text is an expression, such as "Gap()".

    Raises:
        ConfigError: the text is no such call, an expression is none, or there is no such argument.

    Example:
        >>> with_arguments("FedBuff(20, 5)", {"buffer_size": 10, "weighting": "Gap()"})
        'FedBuff(concurrency=20, buffer_size=10, weighting=Gap())'
    """
    try:
        call = _call(text)
        make, name = _named(call.func), ast.unparse(call.func)
        if not callable(make):
            raise _UnreadableError(_EXAMPLE)
        how = signature(make)
        given = _bound(how.bind_partial, name, call.args, _keywords(call, name)).arguments
        for argument, value in arguments.items():
            require_known(argument, how.parameters, name, {})
            given[argument] = _parsed(value if isinstance(value, str) else repr(value))
    except _UnreadableError as problem:
        raise ConfigError(f"strategy = {shown(text)}: {problem}") from None
    keywords = [ast.keyword(argument, value) for argument, value in given.items()]
    return ast.unparse(ast.Call(call.func, [], keywords))


def with_whole_paths(text: str) -> str:
    """Return a text that means the same from any directory: paths in it that exist are whole.

    Args:
        text: the call of a method; anything else is returned as it is.

    Example:
        >>> with_whole_paths("FedBuff(20, 5, resume='no such folder')")
        "FedBuff(20, 5, resume='no such folder')"
    """
    is_changed = False
    try:
        tree = _call(text)
        for call in ast.walk(tree):
            for path in _paths(call) if isinstance(call, ast.Call) else ():
                place = Path(str(path.value))
                if path.value and not place.is_absolute() and place.exists():
                    path.value, is_changed = str(place.resolve()), True
    except _UnreadableError:
        return text
    return ast.unparse(tree) if is_changed else text


def _paths(call: ast.Call) -> list[ast.Constant]:
    """Return the arguments of a call that are texts where a path is expected."""
    make, name = _named(call.func), ast.unparse(call.func)
    if not callable(make):
        return []
    how = signature(make)
    given = _bound(how.bind_partial, name, call.args, _keywords(call, name)).arguments
    return [
        value
        for argument, value in given.items()
        if isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and Path in get_args(how.parameters[argument].annotation)
    ]


def names() -> list[str]:
    """Return the names that a text may hold without `flower.`, sorted."""
    return sorted({**_added(), **_own()})


def classes() -> list[type]:
    """Return the classes that a text may name; none of another package that cannot be loaded."""
    found = [*_own().values()]
    for load in _added().values():
        with suppress(Exception):
            found.append(load())
    return [part for part in found if isinstance(part, type)]


@cache
def _own() -> Mapping[str, object]:
    """List the parts that this package offers, by name."""
    found: dict[str, object] = {"inf": inf}
    for room in _ROOMS.values():
        found |= _offered(room)
    return found | {name: getattr(server, name) for name in ("Checkpoints", "Validation")}


def _offered(room: ModuleType) -> dict[str, object]:
    """Return the parts of a room, the functions that make some, and settings that it names."""
    found = {name: getattr(room, name) for name in getattr(room, "__all__", vars(room))}
    return {name: value for name, value in found.items() if _is_part(value)}


def _is_part(value: object) -> bool:
    if not isinstance(value, type):
        makers = (schedule.k_sync.__module__, weighting.constant.__module__)
        return isinstance(value, _SETTINGS) or (isroutine(value) and value.__module__ in makers)
    is_kind = issubclass(value, _BASES) and value not in _BASES and not isabstract(value)
    return is_kind or value in _SETTINGS


@cache
def _added() -> Mapping[str, Callable[[], object]]:
    """Map the names that other packages add to their loaders."""
    return {point.name: point.load for point in entry_points(group=GROUP)}


def _strategy(text: str, settings: dict[str, object]) -> Strategy:
    tree = _call(text)
    make = _named(tree.func)
    if not isinstance(make, type) or not issubclass(make, Strategy):
        raise _UnreadableError(f"{ast.unparse(tree.func)} is no strategy: {_EXAMPLE}")
    twice = [keyword.arg for keyword in tree.keywords if keyword.arg in settings]
    if not issubclass(make, StaleStrategy):
        usual = StaleStrategy()
        unknown = [
            name
            for name, value in settings.items()
            if name != "seed" and repr(value) != repr(getattr(usual, name, None))
        ]
        if unknown:
            name = ast.unparse(tree.func)
            raise _UnreadableError(f"{name} has no {unknown[0]}: expected a strategy of fedstale's")
        settings = {}
    elif twice:
        raise _UnreadableError(f"{twice[0]} is set outside of the text already: expected it once")
    made = _called(tree, settings)
    assert isinstance(made, Strategy)
    return made


def _call(text: str) -> ast.Call:
    tree = _parsed(text)
    if not isinstance(tree, ast.Call):
        raise _UnreadableError(_EXAMPLE)
    return tree


def _parsed(text: str) -> ast.expr:
    if len(text) > _MOST_TEXT:
        raise _UnreadableError(f"{len(text):,} characters: expected at most {_MOST_TEXT:,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _UnreadableError(_EXAMPLE) from None
    level: list[ast.AST] = [tree]
    for _ in range(_MOST_DEEP):
        for node in level:
            number = node.value if isinstance(node, ast.Constant) else 0
            if isinstance(number, int) and number >= _MOST_NUMBER:
                raise _UnreadableError(f"a whole number is too large: {_EXAMPLE}")
        level = [inside for node in level for inside in ast.iter_child_nodes(node)]
    if level:
        raise _UnreadableError(f"more than {_MOST_DEEP} levels of brackets or signs: {_EXAMPLE}")
    return tree


def _value(node: ast.expr) -> object:
    """Evaluate a part of the text."""
    match node:
        case ast.Call():
            return _called(node, {})
        case ast.Name() | ast.Attribute():
            found = _named(node)
            if callable(found):
                raise _UnreadableError(f"{ast.unparse(node)}: expected {ast.unparse(node)}(...)")
            return found
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.Tuple(items):
            return tuple(_value(item) for item in items)
        case ast.Dict(keys, items) if None not in keys:
            pairs = zip(keys, items, strict=True)
            return {_value(key): _value(item) for key, item in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        text = shown(ast.unparse(node))
        raise _UnreadableError(f"{text}: expected a literal or a part such as Gap()") from None


def _called(node: ast.Call, settings: Mapping[str, object]) -> object:
    make, name = _named(node.func), ast.unparse(node.func)
    if not callable(make):
        raise _UnreadableError(f"{name}() is a value: expected {name}")
    how, arguments = signature(make), [_value(argument) for argument in node.args]
    named = {argument: _value(value) for argument, value in _keywords(node, name).items()}
    for argument in named:
        require_known(argument, how.parameters, name, {})
    _bound(how.bind, name, arguments, {**named, **settings})
    try:
        return make(*arguments, **named, **settings)
    except FedstaleError:
        raise
    except Exception as problem:
        # Parts of Flower's and of other packages check, or do not, as they like.
        raise _UnreadableError(f"{name}: {shown(problem)}") from problem


def _keywords(call: ast.Call, name: str) -> dict[str, ast.expr]:
    """Return the arguments of a call that are given by name."""
    found = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in found:
        raise _UnreadableError(f"{name}: expected arguments by name, not **")
    return {argument: value for argument, value in found.items() if argument is not None}


def _bound(
    bind: Callable[..., BoundArguments],
    name: str,
    arguments: Sequence[object],
    named: Mapping[str, object],
) -> BoundArguments:
    """Return arguments by the parameters that they are for."""
    try:
        return bind(*arguments, **named)
    except TypeError as problem:
        raise _UnreadableError(f"{name}: {problem}") from None


def _named(node: ast.expr) -> object:
    """Resolve a name."""
    match node:
        case ast.Attribute(ast.Name("flower"), name):
            offered = {name: getattr(flower, name) for name in flower.__all__}
            return _lookup(name, {k: made for k, made in offered.items() if not isabstract(made)})
        case ast.Attribute(ast.Name(room), name) if room in _ROOMS:
            return _lookup(name, _offered(_ROOMS[room]))
        case ast.Name(name):
            load = None if name in _own() else _added().get(name)
            return _lookup(name, _own(), _added()) if load is None else _loaded(name, load)
    raise _UnreadableError(f"{shown(ast.unparse(node))}: expected a name such as FedBuff")


def _loaded(name: str, load: Callable[[], object]) -> object:
    """Load a name that another package adds; a package that it lacks is named."""
    try:
        return load()
    except Exception as problem:
        raise _UnreadableError(f"{name} {not_loaded(problem)}") from None


def _lookup(name: str, known: Mapping[str, object], more: Iterable[str] = ()) -> object:
    """Look a name up; the error names the nearest known one."""
    if name in known:
        return known[name]
    near = get_close_matches(name, [*known, *more], n=1)
    expected = repr(near[0]) if near else "a method, a part or a stage such as FedBuff"
    raise _UnreadableError(f"{shown(name)} is unknown: expected {expected}")
