"""What parts of a strategy have in common: checked arguments, a repr, state that is saved.

A type says what is accepted, in words too: `Annotated[int, Ge(1), "an integer >= 1"]`; the last
words count, and where there are none they follow from the type. Pydantic decides whether a value
fits, and is loaded with the first part that has arguments. What is checked is what fedstale's own
classes annotate: arguments of `__init__` of a `Checked`, and fields of a dataclass that calls
`check_fields`. Classes of other packages are left alone, also those that inherit from ours.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from functools import cache, cached_property, partial, wraps
from inspect import Parameter, signature
from math import inf
from numbers import Integral
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from fedstale.errors import ConfigError, quoted

if TYPE_CHECKING:
    from pydantic import TypeAdapter

F = TypeVar("F", bound=Callable[..., Any])

Count = Annotated[int, Ge(1), "an integer >= 1"]
Whole = Annotated[int, Ge(0), "an integer >= 0"]
Share = Annotated[float, Ge(0), Le(1), "a number in [0, 1]"]
PositiveShare = Annotated[float, Gt(0), Le(1), "a number in (0, 1]"]
Decay = Annotated[float, Ge(0), Lt(1), "a number in [0, 1)"]
Chance = Annotated[float, Gt(0), Lt(1), "a chance in (0, 1)"]
Positive = Annotated[float, Gt(0), Lt(inf), "a finite number > 0"]
NotNegative = Annotated[float, Ge(0), Lt(inf), "a finite number >= 0"]
Finite = Annotated[float, Gt(-inf), Lt(inf), "a finite number"]
AtLeastOne = Annotated[float, Ge(1), Lt(inf), "a finite number >= 1"]
Seconds = Annotated[float, Gt(0), "seconds > 0"]

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "True or False",
    NoneType: "None",
    Path: "a path",
    Callable: "a function",
}
_OWN = "fedstale."

shown = partial(quoted, most=120, show=repr)
"""Returns a value as a sentence shows it, by its repr; see `quoted`."""


class Checks:
    """Whether arguments are checked."""

    are_on: bool = False
    """Off while the package is imported: what it makes for itself is known to fit."""


class Checked:
    """Checks the arguments of its subclasses in fedstale."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of a class of fedstale."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.__module__.startswith(_OWN):
            setattr(cls, "__init__", checked(vars(cls)["__init__"]))  # noqa: B010 - mypy


def checked(function: F) -> F:
    """Check the arguments of a function, or of a class's constructor.

    It raises ConfigError, in a sentence with the class or function, the argument, the value and
    what is accepted.

    Example:
        >>> from fedstale.strategies.weighting import polynomial
        >>> polynomial(a="much")  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.polynomial.a = 'much': expected a finite number >= 0
        (0 ignores age)
    """
    is_method = function.__name__ == "__init__"

    @wraps(function)
    def checking(*values: Any, **named: Any) -> Any:
        if Checks.are_on:
            owner = type(values[0]).__name__ if is_method else function.__name__
            names, hints = _annotated(function)
            for name, value in (*zip(names, values, strict=False), *named.items()):
                if name in hints:
                    hints[name].check(owner, name, value)
        return function(*values, **named)

    return checking  # type: ignore[return-value] # wraps keeps the signature


def check_fields(part: Any) -> None:
    """Raise ConfigError unless each field of a dataclass is what fedstale's classes annotate."""
    if Checks.are_on:
        cls = part.__class__
        for name, argument in _of_fields(cls).items():
            argument.check(cls.__name__, name, getattr(part, name))


def in_words(accepted: object) -> str:
    """Describe the values that a type accepts.

    Example:
        >>> in_words(Count | None), in_words(Literal["keep", "cancel"])
        ('an integer >= 1, or None', 'keep|cancel')
    """
    origin, inside = get_origin(accepted), get_args(accepted)
    if origin is Annotated:
        words = [each for each in inside[1:] if isinstance(each, str)]
        return words[-1] if words else in_words(inside[0])
    if origin in (Union, UnionType):
        *first, last = (in_words(each) for each in inside)
        return f"{', '.join(first)}, or {last}"
    if origin is Literal:
        return "|".join(str(each) for each in inside)
    if origin is None or origin is Callable:
        kind = origin or accepted
        return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"
    kind = "a mapping" if issubclass(origin, Mapping) else "a list"
    return f"{kind} of {in_words(inside[-1])}"


class _Argument:
    """What is accepted for one argument."""

    def __init__(self, accepted: object) -> None:
        self.accepted = accepted

    @cached_property
    def _adapter(self) -> "TypeAdapter[Any]":
        # It takes 40 ms and 6 MB, and devices that only train and forecast do without.
        from pydantic import ConfigDict, TypeAdapter  # noqa: PLC0415

        config = ConfigDict(strict=True, arbitrary_types_allowed=True)
        # In a tuple, a dataclass obeys this config too.
        return TypeAdapter(tuple[self.accepted], config=config)  # type: ignore[name-defined]

    def check(self, owner: str, name: str, value: object) -> None:
        """Raise ConfigError unless a value fits."""
        try:
            # No argument is a class: of one that is given, parentheses are missing.
            if not isinstance(value, type):
                self._adapter.validate_python((value,))
                return
        except (ValueError, RecursionError):
            pass
        require(False, f"{owner}.{name}", value, in_words(self.accepted))


@cache
def _annotated(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, _Argument]]:
    """Return the names of a function's arguments by place, and what is accepted for each."""
    hints = get_type_hints(function, include_extras=True)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = signature(function).parameters.values()
    names = tuple(each.name for each in parameters if each.kind in kinds[:2])
    known = [each.name for each in parameters if each.kind in kinds and each.name in hints]
    return names, {name: _Argument(hints[name]) for name in known}


@cache
def _of_fields(cls: type) -> dict[str, _Argument]:
    """Return the accepted type of each field of a dataclass that fedstale annotates."""
    names = {field.name for field in fields(cls)}
    found: dict[str, _Argument] = {}
    for base in reversed(cls.__mro__):
        own = names & vars(base).get("__annotations__", {}).keys()
        is_ours = base.__module__.startswith(_OWN)
        hints = get_type_hints(base, include_extras=True) if is_ours else {}
        found = {name: argument for name, argument in found.items() if name not in own}
        found |= {name: _Argument(hints[name]) for name in own & hints.keys()}
    return found


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
        raise ConfigError(f"strategy.{field} = {shown(value)}: expected {accepted}")


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
        raise ConfigError(f"{owner} has no setting {shown(name)}: expected {accepted}")


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer (and no bool) of at least some size."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


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
