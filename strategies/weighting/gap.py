"""Gap-Aware: divide a stale update by how far the model has moved since it was sent out.

Age says how many versions have passed; the gap says how much they changed. An update that is ten
versions old may fit perfectly where the model has stood still, and be worthless where it has moved.

The unit of the gap is C, how far the server typically moves in one step: a bias-corrected root mean
square of the server's own steps,

    r <- g r + (1 - g) step^2,    C = eta_max sqrt(r / (1 - g^n)),

where step is the movement divided by the rate that made it, eta_max is the largest rate so far and
n counts the steps really seen. When a schedule lowers the rate, C keeps the size that a step had at
the largest rate, so that the penalty on stale updates fades with the rate.

r is kept in float32 at least. One step may be enormous, by a mistake or an attack: its square may
overflow, and even where it does not, it would let the model go anywhere at no penalty for hundreds
of steps. So a step counts for at most `MOST_SIZES` times the largest running size around it.

Reference:
    Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any, Literal

import numpy as np

from fedstale.strategies.types import (
    Array,
    ClientUpdate,
    Decay,
    Model,
    Share,
    Stateful,
    at_least_single,
    check_fields,
    chunk_sum,
    inner,
    over_chunks,
    scale,
    square_distance,
)
from fedstale.strategies.weighting.base import Weighting

Grain = Literal["parameter", "layer", "model"]
MODEL = ""
MOST_SIZES = 100.0
"""Largest step that r takes in, in running sizes: of the array, 2^17 parameters at a time, or of
the layer or model. A first step, and one where nothing has moved yet, counts whole."""
_LARGEST = 1e16
"""Largest step of all: float32 holds its square, and C where the rate is large."""


@dataclass(eq=False)
class StepSize(Stateful):
    """Running size of the server's steps, per parameter, per layer or for the whole model."""

    saved = ("n", "rate", "squares")

    of: Grain
    """One size for each parameter, for each array, or for the model; the last two are norms."""
    decay: Decay
    """g, in [0, 1)."""
    n: int = 0
    """Steps seen."""
    rate: float = 0.0
    """Largest rate so far."""
    squares: Model = field(default_factory=dict)
    """r: arrays in the shapes of the model, or one number for each layer or for the model."""
    _sizes: Model = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """Update by one step of the server; a step at rate 0 tells nothing and is left out."""
        rate = abs(rate)
        if rate == 0.0:
            return
        g, seen = self.decay, 1 - self.decay**self.n
        self.n += 1
        self._sizes = {}
        self.rate = max(self.rate, rate)
        if self.of == "parameter":
            self.squares = self.squares or _zeros(after)
            follow = partial(_follow, rate=rate, decay=g, seen=seen)
            over_chunks(follow, self.squares, before, after)
            return
        for key, names in self.groups(before).items():
            total = square_distance({name: before[name] for name in names}, after)
            r = float(self.squares.get(key, 0.0))
            most = _largest(r, seen) ** 2
            self.squares[key] = np.asarray(g * r + (1 - g) * min(total / rate**2, most))

    def scale(self) -> float:
        """Compute the factor from sqrt(r) to C; 0 before the first step."""
        return self.rate / sqrt(1.0 - self.decay**self.n) if self.n else 0.0

    def sizes(self, like: Model) -> Model:
        """Return C of every parameter, with the smallest normal number in place of 0.

        All updates of a buffer share it, so it is worked out once for each step of the server.

        Args:
            like: a model, for the shapes before the first step.
        """
        if not self._sizes:
            self._sizes = _zeros(like)
            squares = self.squares if self.n else self._sizes
            over_chunks(partial(_size, scale=self.scale()), self._sizes, squares)
        return self._sizes

    def size(self, name: str) -> float:
        """Return C of a layer, or of the model under the name `MODEL`; 0 before the first step."""
        return sqrt(float(self.squares[name])) * self.scale() if self.n else 0.0

    def groups(self, model: Model) -> dict[str, list[str]]:
        """Return the names of the arrays that share a size: of each layer, or of the model."""
        return {name: [name] for name in model} if self.of == "layer" else {MODEL: list(model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        super().load_state_dict(state)
        self._sizes = {}


def _zeros(like: Model) -> Model:
    """Return zeros in the shapes of a model, in float32 at least."""
    return {name: np.zeros(x.shape, at_least_single(x.dtype)) for name, x in like.items()}


def _largest(r: float, seen: float) -> float:
    """Return the largest step that counts whole.

    Args:
        r: the largest mean square so far, not corrected for its bias.
        seen: 1 - g^n after the n steps so far.
    """
    return min(MOST_SIZES * sqrt(r / seen), _LARGEST) if r > 0.0 else _LARGEST


def _size(c: Array, r: Array, *, scale: float) -> None:
    """Write C of one chunk."""
    np.sqrt(r, out=c)
    np.multiply(c, c.dtype.type(scale), out=c)
    np.maximum(c, np.finfo(c.dtype).tiny, out=c)


def _follow(
    r: Array, before: Array, after: Array, *, rate: float, decay: float, seen: float
) -> None:
    """Update r of one chunk by a server step."""
    g = r.dtype.type(decay)
    step = np.subtract(after, before, dtype=r.dtype)
    if rate != 1.0:
        step /= step.dtype.type(rate)
    most = r.dtype.type(_largest(float(r.max()), seen))
    np.clip(step, -most, most, out=step)
    step *= step
    step *= 1 - g
    np.multiply(r, g, out=r)
    np.add(r, step, out=r)


class Gap(Weighting):
    """Divides an update by G = min(1 + |theta_now - theta_base| / C, 1 + tau).

    C is the distance that a parameter (a layer, the model) travels in one server update; see
    `StepSize`. Where C is 0, a parameter that has not moved has G = 1 (a frozen one), and one that
    has moved has the largest G, 1 + tau.

    Differences from the paper:
        An update is the sum of several local steps, and the gap is taken when it is weighed.
        G is at most 1 + tau: a gap says at most that each version went a typical step.
        C comes from the server's steps, which hold whatever its optimizer does, not from gradients.
        A step counts in C for at most `MOST_SIZES` running sizes.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.

    Example:
        >>> weighting = Gap(decay=0.0)
        >>> theta = [{"w": np.array([0.0, x])} for x in (0.0, 1.0, 2.0)]
        >>> weighting.observe(theta[0], theta[1], 1.0)
        >>> weighting.observe(theta[1], theta[2], 1.0)
        >>> update = ClientUpdate(
        ...     delta={"w": np.array([6.0, 6.0])}, base=theta[0], current=theta[2], staleness=2
        ... )
        >>> round(weighting.weigh(update), 6)
        0.666667
        >>> update.delta["w"]
        array([6., 2.])
    """

    saved = ("travel",)
    from_update_alone = True

    def __init__(self, *, of: Grain = "parameter", decay: Decay = 0.97) -> None:
        """Start with no step seen.

        Args:
            of: one G for each parameter, for each array, or for the model.
            decay: of the mean square of steps; 0.999 for single gradients, 0.97 for federated
                steps, which are fewer and larger.
        """
        self.of, self.decay = of, decay
        self.travel = StepSize(of, decay=decay)

    def weigh(self, update: ClientUpdate) -> float:
        """Divide the update by G; see the class."""
        if update.staleness == 0:
            return 1.0
        if self.travel.of == "parameter":
            return self._weigh_parameters(update)
        return _weigh_by_norms(update, self.travel, along_share=0.0, distance_share=1.0)

    def _weigh_parameters(self, update: ClientUpdate) -> float:
        models = (update.delta, update.current, update.base, self.travel.sizes(update.current))
        divide = partial(_divide_by_gap, cap=1.0 + update.staleness)
        # The quotient may vanish where C is 0, and the sum may overflow; G is then its cap.
        with np.errstate(over="ignore", under="ignore"):
            weights = over_chunks(divide, *models)
        size = sum(delta.size for delta in update.delta.values())
        return sum(weights) / size if size else 1.0

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """See one step of the server."""
        self.travel.observe(before, after, rate)


class DirectionalGap(Gap):
    """Divides an update by G = min(1 + (max(0, <moved, u>) + b |moved|) / C, 1 + tau).

    Here moved = theta_now - theta_base and u is the update's unit direction. Only movement that the
    server has already made in the update's own direction is held against it: such an update would
    overshoot. One that points elsewhere, from a slow client with examples that no other has, adds
    something however old it is, and keeps nearly all of its weight; the share b of the plain gap
    remains because it was computed at another point.

    This weighting is fedstale's own; it has no paper.

    Example:
        >>> weighting = DirectionalGap(of="model", decay=0.0, share=0.0)
        >>> theta = [{"w": np.array([x, 0.0])} for x in (0.0, 1.0, 2.0)]
        >>> weighting.observe(theta[0], theta[1], 1.0)
        >>> weighting.observe(theta[1], theta[2], 1.0)
        >>> def weigh(*delta):
        ...     delta = {"w": np.array(delta)}
        ...     stale = ClientUpdate(delta=delta, base=theta[0], current=theta[2], staleness=2)
        ...     return round(weighting.weigh(stale), 6)
        >>> weigh(5.0, 0.0), weigh(-5.0, 0.0), weigh(0.0, 5.0)
        (0.333333, 1.0, 1.0)
    """

    def __init__(
        self,
        *,
        share: Share = 0.1,
        of: Literal["layer", "model"] = "layer",
        decay: Decay = 0.97,
    ) -> None:
        """Start with no step seen.

        Args:
            share: b, how much of the plain gap counts in any direction, in [0, 1].
            of: one G for each array ("layer") or for the "model".
            decay: of the mean square of steps, as in `Gap`.
        """
        super().__init__(of=of, decay=decay)
        self.share = share

    def weigh(self, update: ClientUpdate) -> float:
        """Divide the update by G; see the class."""
        if update.staleness == 0:
            return 1.0
        return _weigh_by_norms(update, self.travel, along_share=1.0, distance_share=self.share)


def _divide_by_gap(delta: Array, now: Array, base: Array, c: Array, *, cap: float) -> float:
    """Divide one chunk by its gap in place.

    1 / min(1 + |moved| / C, cap) is computed as max(C / (C + |moved|), 1 / cap), with one division.

    Args:
        delta: part of the update; written to.
        now: the same part of the current model.
        base: the same part of the model that the device received.
        c: C, > 0.
        cap: largest G.

    Returns:
        The sum of 1/G over the chunk.
    """
    weight = np.subtract(now, base, dtype=c.dtype)
    np.abs(weight, out=weight)
    weight += c
    np.divide(c, weight, out=weight)
    np.maximum(weight, weight.dtype.type(1.0 / cap), out=weight)
    delta *= weight
    return chunk_sum(weight)


def _weigh_by_norms(
    update: ClientUpdate, travel: StepSize, *, along_share: float, distance_share: float
) -> float:
    """Divide each layer, or the whole update, by a gap of norms."""
    weights, sizes = [], []
    for key, names in travel.groups(update.delta).items():
        distance, along = _movement(update, names)
        moved = along_share * max(0.0, along) + distance_share * distance
        weight = 1.0 / _gap(moved, travel.size(key), 1.0 + update.staleness)
        scale({name: update.delta[name] for name in names}, weight)
        weights.append(weight)
        sizes.append(sum(update.delta[name].size for name in names))
    return float(np.average(weights, weights=sizes)) if sum(sizes) else 1.0


def _gap(moved: float, typical: float, cap: float) -> float:
    if moved == 0.0:
        return 1.0
    return min(1.0 + moved / typical, cap) if typical > 0.0 else cap


def _movement(update: ClientUpdate, names: list[str]) -> tuple[float, float]:
    """Return |moved| and <moved, u> over some arrays; a zero update has no direction."""
    delta = {name: update.delta[name] for name in names}
    parts = over_chunks(_products, delta, update.current, update.base)
    squares, along, norm = (sum(part) for part in zip(*parts, strict=True)) if parts else (0.0,) * 3
    return sqrt(squares), along / sqrt(norm) if norm > 0.0 else 0.0


def _products(delta: Array, now: Array, base: Array) -> tuple[float, float, float]:
    """Return <moved, moved>, <moved, delta> and <delta, delta> of one chunk."""
    moved = np.subtract(now, base, dtype=at_least_single(now.dtype))
    return inner(moved, moved), inner(moved, delta), inner(delta, delta)
