"""Gap-Aware: divide a late update by how far the model has moved since it was sent out.

Age says how many versions have passed; the gap says how much they changed. An update that is ten
versions old may fit perfectly where the model has stood still, and be worthless where it has moved.
"""

from collections.abc import Mapping
from functools import partial
from math import sqrt

import numpy as np

from fedstale.strategies import compiled
from fedstale.strategies.arrays import Array, Model, chunk_sum, inner, over_chunks, scale
from fedstale.strategies.settings import require
from fedstale.strategies.travel import MODEL, Grain, Steps, Travel
from fedstale.strategies.weighting import Update, Weighting


class Gap(Weighting):
    """Divides an update by G = min(1 + |theta_now - theta_base| / C, 1 + tau).

    C is the distance that a parameter (a layer, the model) travels in one server update; see
    `Travel`. Where C is 0, a parameter that has not moved has G = 1 (a frozen one), and one that
    has moved has the largest G, 1 + tau.

    Differences from the paper:
        An update is the sum of several local steps, and the gap is taken when it is merged.
        G is at most 1 + tau: a gap says at most that each version went a typical step.
        C comes from the server's steps, which hold whatever its optimizer does, not from gradients.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.

    Example:
        >>> weighting = Gap(decay=0.0)
        >>> theta = [{"w": np.array([0.0, x])} for x in (0.0, 1.0, 2.0)]
        >>> weighting.observe(theta[0], theta[1], 1.0)
        >>> weighting.observe(theta[1], theta[2], 1.0)
        >>> update = Update(
        ...     delta={"w": np.array([6.0, 6.0])}, base=theta[0], current=theta[2], staleness=2
        ... )
        >>> round(weighting.weigh(update), 6)
        0.666667
        >>> update.delta["w"]
        array([6., 2.])
    """

    def __init__(
        self, *, of: Grain = "parameter", decay: float = 0.97, steps: Steps = "maximal"
    ) -> None:
        """Start with no step seen.

        Args:
            of: one G for each parameter, for each array, or for the model.
            decay: of the mean square of steps; 0.999 for single gradients, 0.97 for federated
                merges, which are fewer and larger.
            steps: "maximal" or "actual"; see `Travel`.
        """
        self.travel = Travel(of, decay=decay, steps=steps)

    def weigh(self, update: Update) -> float:
        """Divide the update by G; see the class."""
        if update.staleness == 0:
            return 1.0
        if self.travel.of == "parameter":
            return self._weigh_parameters(update)
        return _weigh_by_norms(update, self.travel, along_share=0.0, distance_share=1.0)

    def _weigh_parameters(self, update: Update) -> float:
        models = (update.delta, update.current, update.base, self.travel.sizes(update.current))
        divide = partial(compiled.gap_loop(*models) or divide_by_gap, cap=1.0 + update.staleness)
        # The quotient may vanish where C is 0, and the sum may overflow; G is then its cap.
        with np.errstate(over="ignore", under="ignore"):
            weights = over_chunks(divide, *models)
        size = sum(delta.size for delta in update.delta.values())
        return sum(weights) / size if size else 1.0

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """See one step of the server."""
        self.travel.observe(before, after, rate)

    def state_dict(self) -> dict[str, Array | float]:
        """Return the state of C."""
        return self.travel.state_dict()

    def load_state_dict(self, state: Mapping[str, Array | float]) -> None:
        """Continue from a checkpoint."""
        self.travel.load_state_dict(state)

    def __repr__(self) -> str:
        travel = self.travel
        return f"Gap(of={travel.of!r}, decay={travel.decay}, steps={travel.steps!r})"


class DirectionalGap(Gap):
    """Divides an update by G = min(1 + (max(0, <moved, u>) + b |moved|) / C, 1 + tau).

    Here moved = theta_now - theta_base and u is the update's unit direction. Only movement that the
    server has already made in the update's own direction is held against it: such an update would
    overshoot. One that points elsewhere, from a slow device with examples that nobody else has, is
    news however old it is, and keeps nearly all of its weight; the share b of the plain gap remains
    because even news was computed at another point.

    This weighting is fedstale's own; it has no paper.

    Example:
        >>> weighting = DirectionalGap(of="model", decay=0.0, share=0.0)
        >>> theta = [{"w": np.array([x, 0.0])} for x in (0.0, 1.0, 2.0)]
        >>> weighting.observe(theta[0], theta[1], 1.0)
        >>> weighting.observe(theta[1], theta[2], 1.0)
        >>> def weigh(*delta):
        ...     delta = {"w": np.array(delta)}
        ...     late = Update(delta=delta, base=theta[0], current=theta[2], staleness=2)
        ...     return round(weighting.weigh(late), 6)
        >>> weigh(5.0, 0.0), weigh(-5.0, 0.0), weigh(0.0, 5.0)
        (0.333333, 1.0, 1.0)
    """

    def __init__(
        self,
        *,
        share: float = 0.1,
        of: Grain = "layer",
        decay: float = 0.97,
        steps: Steps = "maximal",
    ) -> None:
        """Start with no step seen.

        Args:
            share: b, how much of the plain gap counts in any direction, in [0, 1].
            of: one G for each array ("layer") or for the "model".
            decay: of the mean square of steps, as in `Gap`.
            steps: "maximal" or "actual"; see `Travel`.
        """
        require(0 <= share <= 1, "weighting.share", share, "a number in [0, 1], such as 0.1")
        require(of in {"layer", "model"}, "weighting.of", of, "layer|model")
        super().__init__(of=of, decay=decay, steps=steps)
        self.share = share

    def weigh(self, update: Update) -> float:
        """Divide the update by G; see the class."""
        if update.staleness == 0:
            return 1.0
        return _weigh_by_norms(update, self.travel, along_share=1.0, distance_share=self.share)

    def __repr__(self) -> str:
        return f"Directional{super().__repr__()[:-1]}, share={self.share})"


def divide_by_gap(delta: Array, now: Array, base: Array, c: Array, *, cap: float) -> float:
    """Divide one chunk by its gap in place.

    1 / min(1 + |moved| / C, cap) is computed as max(C / (C + |moved|), 1 / cap), with one division.
    `compiled.gap_loop` is the same in one pass over memory, to the last bit.

    Args:
        delta: part of the update; written to.
        now: the same part of the current model.
        base: the same part of the model that the device received.
        c: C, > 0.
        cap: largest G.

    Returns:
        The sum of 1/G over the chunk.
    """
    weight = now - base
    np.abs(weight, out=weight)
    weight += c
    np.divide(c, weight, out=weight)
    np.maximum(weight, weight.dtype.type(1.0 / cap), out=weight)
    delta *= weight
    return chunk_sum(weight)


def _weigh_by_norms(
    update: Update, travel: Travel, *, along_share: float, distance_share: float
) -> float:
    """Divide each layer, or the whole update, by a gap of norms."""
    groups = [[name] for name in update.delta] if travel.of == "layer" else [list(update.delta)]
    weights, sizes = [], []
    for names in groups:
        key = names[0] if travel.of == "layer" else MODEL
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


def _movement(update: Update, names: list[str]) -> tuple[float, float]:
    """Return |moved| and <moved, u> over some arrays; a zero update has no direction."""
    delta = {name: update.delta[name] for name in names}
    parts = over_chunks(_products, delta, update.current, update.base)
    squares, along, norm = (sum(part) for part in zip(*parts, strict=True)) if parts else (0.0,) * 3
    return sqrt(squares), along / sqrt(norm) if norm > 0.0 else 0.0


def _products(delta: Array, now: Array, base: Array) -> tuple[float, float, float]:
    """Return <moved, moved>, <moved, delta> and <delta, delta> of one chunk."""
    moved = now - base
    return inner(moved, moved), inner(moved, delta), inner(delta, delta)
