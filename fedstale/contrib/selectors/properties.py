"""Choose nodes by what they say they are: their region, a GPU, a battery that is charging.

Devices state what `ForecastMod(properties=...)` names, with each reply. A server that is to know it
before the first job asks for it by `ForecastRequest`. A statement is no more than that.
"""

import ast
import logging
import operator
from collections.abc import Callable, Mapping

import numpy as np

from fedstale.strategies.selection import Random, Selector
from fedstale.strategies.types import Candidates, Count, require

logger = logging.getLogger(__name__)

_COMPARE: dict[type, Callable[..., bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
_PARTS = (
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, *_COMPARE),
    *(ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)
"""What an expression is made of; nothing in it can be called, or looked up in anything."""
_LONGEST = 1000
ACCEPTED = "comparisons of properties with texts and numbers, joined by and, or and not"


class Filtered(Selector):
    """Lets another selector choose among nodes of which an expression is true.

    An expression compares properties (`==`, `!=`, `<`, `<=`, `>`, `>=`, `in`) and joins that by
    `and`, `or` and `not`. Of a node that has not stated a property nothing is known: neither what
    is said of it is true nor the opposite, and the node is not chosen by it.

    Example:
        >>> regions = [{"region": "eu"}, {"region": "us"}, {}]
        >>> nodes = Candidates.of([7, 8, 9], properties=regions)
        >>> Filtered("region != 'us'").select(nodes, 3, 0.0, np.random.default_rng(0))
        [7]
    """

    saved = ("then",)

    def __init__(self, where: str, then: Selector | None = None) -> None:
        """Set the expression, and the selector that chooses; `Random()` if None."""
        self.where, self.then = where, then or Random()
        self._tree, self._has_warned = parsed(where), False
        self._names = {part.id for part in ast.walk(self._tree) if isinstance(part, ast.Name)}

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Let the other pick among the nodes that fit; none if none does."""
        names, stated = self._names, candidates.properties
        if not names <= stated.keys() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Filtered(%r): no device states %s; stated are: %s. Devices state what "
                "ForecastMod(properties=...) names, and ForecastRequest() asks before a first job",
                self.where,
                ", ".join(sorted(names - stated.keys())),
                ", ".join(sorted(stated)) or "none",
            )
        nobody = np.full(len(candidates), None)
        columns = [stated.get(name, nobody).tolist() for name in names]
        known: dict[tuple[object, ...], bool] = {}
        fits = np.zeros(len(candidates), np.bool_)
        for i, values in enumerate(zip(*columns, strict=True)):
            if values not in known:
                of = dict(zip(names, values, strict=True))
                known[values] = truth(self._tree, of) is True
            fits[i] = known[values]
        return self.then.select(candidates.take(fits), k, now, rng) if fits.any() else []


class Quota(Selector):
    """Keeps at least some nodes of each value of a property at work, as of each region.

    Places that a value lacks are filled first, by another selector among its nodes; that selector
    then picks among all the others. A node that states no value has no quota.
    """

    saved = ("then",)

    def __init__(self, name: str, least: Count = 1, then: Selector | None = None) -> None:
        """Set the property, the least number of nodes of each value, and who chooses."""
        self.name, self.least, self.then = name, least, then or Random()

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Fill up each value, and pick the rest."""
        here, out = (
            each.properties.get(self.name, np.full(len(each), None))
            for each in (candidates, candidates.in_flight)
        )
        picked: list[int] = []
        for value in sorted({*here.tolist()} - {None}, key=lambda value: (str(type(value)), value)):
            missing = min(self.least - int((out == value).sum()), k - len(picked))
            if missing > 0:
                picked += self.then.select(candidates.take(here == value), missing, now, rng)
        others = candidates.take(~np.isin(candidates.node_ids, np.array(picked, np.uint64)))
        if len(picked) < k and len(others):
            picked += self.then.select(others, k - len(picked), now, rng)
        return picked


def parsed(where: str) -> ast.expr:
    """Return the tree of an expression.

    Raises:
        ConfigError: it is none, or has parts that are not accepted.
    """
    try:
        tree = ast.parse(where.strip()[:_LONGEST], mode="eval").body
    except (SyntaxError, ValueError):
        tree = ast.Constant(None)
    parts = [*ast.walk(tree)]
    is_accepted = (
        len(where) <= _LONGEST
        and any(isinstance(part, ast.Name) for part in parts)
        and all(isinstance(part, _PARTS) for part in parts)
        and all(
            isinstance(part.value, str | int | float)
            for part in parts
            if isinstance(part, ast.Constant)
        )
    )
    require(is_accepted, "Filtered.where", where, ACCEPTED)
    return tree


def truth(part: ast.expr, of: Mapping[str, object]) -> bool | None:
    """Return whether an expression is true of a node; None if that is not known (Kleene's logic).

    Args:
        part: of `parsed`.
        of: what the node states, by name; None for what it does not.
    """
    match part:
        case ast.BoolOp():
            found = [truth(each, of) for each in part.values]
            decides = isinstance(part.op, ast.Or)
            if decides in found:
                return decides
            return None if None in found else not decides
        case ast.UnaryOp(op=ast.Not()):
            opposite = truth(part.operand, of)
            return None if opposite is None else not opposite
        case ast.Compare():
            values = [_value(each, of) for each in (part.left, *part.comparators)]
            pairs = zip(part.ops, values, values[1:], strict=False)
            found = [_compared(_COMPARE[type(op)], one, other) for op, one, other in pairs]
            return False if False in found else None if None in found else True
    value = _value(part, of)
    return None if value is None else bool(value)


def _compared(compare: Callable[..., bool], one: object, other: object) -> bool | None:
    if one is None or other is None:
        return None
    try:
        return bool(compare(one, other))
    except TypeError:
        # A text is neither more nor less than a number.
        return None


def _value(part: ast.expr, of: Mapping[str, object]) -> object:
    match part:
        case ast.Name():
            return of[part.id]
        case ast.Constant():
            return part.value
        case ast.Tuple() | ast.List():
            return [_value(each, of) for each in part.elts]
        case ast.UnaryOp(op=ast.USub()):
            value = _value(part.operand, of)
            return -value if isinstance(value, int | float) else None
    return truth(part, of)
