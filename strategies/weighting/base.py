"""Weights of client updates: the interface, and the weights that look at age alone.

Every weighting is exactly 1 at zero staleness, so that without stale updates a strategy is FedAvg
(or FedBuff) to the last bit whatever its weighting. `CachedUpdates` alone changes updates
that are not stale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt

from fedstale.strategies.types import ClientUpdate, Model, Part, require, scale

AgeCurve = Callable[[int], float]


class Weighting(Part, ABC):
    """Decides how much an update counts; may learn from the steps that the server makes.

    `weigh` is all that a subclass must define. The server calls `weigh` once for each update, or
    `weigh_stale` once for each buffer, and then either `observe` (the buffer became a step) or
    `discard` (it did not).
    """

    needs_whole_buffer: bool = False
    """Whether stale updates wait until their buffer closes, and are weighed by `weigh_stale`."""
    from_update_alone: bool = False
    """Whether what `weigh` does to an update follows from it and from models that were sent out,
    and from no other update: what `Privacy` needs."""

    @abstractmethod
    def weigh(self, update: ClientUpdate) -> float:
        """Scale or correct the update's delta in place.

        A weighting that corrects updates instead of discounting them, as `CachedUpdates` does,
        changes the delta as it likes and returns 1: `normalise="weights"` divides by the sum of
        what is returned, so this must be the weight that the delta was scaled by, and 1 if it was
        not scaled.

        Returns:
            The weight, the mean over parameters where they differ; exactly 1 at zero staleness.
        """

    def weigh_stale(self, stale: Sequence[ClientUpdate], current_mean: Model) -> list[float]:
        """Do what `weigh` does to all stale updates of one buffer; if `needs_whole_buffer`.

        Args:
            stale: those with a staleness of at least 1, in the order in which they came.
            current_mean: mean of the updates of the buffer that are not stale; empty if there is
                none.

        Returns:
            Their weights.
        """
        return [self.weigh(update) for update in stale]

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """See one step of the server.

        Args:
            before: the model before it.
            after: the model after it.
            rate: the server's learning rate in this step.
        """

    def discard(self) -> None:
        """Discard the updates weighed since the last step: their buffer made no step."""


class ByAge(Weighting):
    """Weighs an update by its staleness alone.

    Example:
        >>> ByAge(polynomial(0.5))
        ByAge(polynomial(a=0.5))
    """

    from_update_alone = True

    def __init__(self, curve: AgeCurve) -> None:
        """Use a curve from staleness to weight.

        Raises:
            ConfigError: the curve is not 1 at zero staleness.
        """
        require(curve(0) == 1.0, "weighting", curve, "a curve that is exactly 1 at staleness 0")
        self.curve = curve

    def weigh(self, update: ClientUpdate) -> float:
        """Multiply the whole update by the curve's value."""
        weight = self.curve(update.staleness)
        scale(update.delta, weight)
        return weight


@dataclass(frozen=True, slots=True, repr=False)
class _Curve:
    name: str
    value: AgeCurve

    def __call__(self, staleness: int) -> float:
        return self.value(staleness)

    def __repr__(self) -> str:
        return self.name


def constant() -> AgeCurve:
    """Return s(tau) = 1: age does not matter."""
    return _Curve("constant()", lambda _: 1.0)


def polynomial(a: float = 0.5) -> AgeCurve:
    """Return s(tau) = (1 + tau)^-a.

    Args:
        a: exponent, >= 0; 1/2 in FedBuff.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.

    Example:
        >>> polynomial(0.5)(3)
        0.5
    """
    require(a >= 0, "weighting.a", a, "a number >= 0 (0 ignores age)")
    return _Curve(f"polynomial(a={a})", lambda tau: float((1.0 + tau) ** -a))


def hinge(a: float = 10.0, b: int = 4) -> AgeCurve:
    """Return s(tau) = 1 for tau <= b, else 1 / (a (tau - b) + 1).

    Args:
        a: steepness beyond the hinge, > 0.
        b: staleness that costs nothing, >= 0.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """
    require(a > 0, "weighting.a", a, "a number > 0")
    require(b >= 0, "weighting.b", b, "a staleness >= 0")
    return _Curve(
        f"hinge(a={a}, b={b})", lambda tau: 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)
    )


def exponential(a: float = 0.1) -> AgeCurve:
    """Return s(tau) = exp(-a tau), with a >= 0."""
    require(a >= 0, "weighting.a", a, "a number >= 0 (0 ignores age)")
    return _Curve(f"exponential(a={a})", lambda tau: exp(-a * tau))


def staleness_aware() -> AgeCurve:
    """Return SA: s(tau) = 1 / tau for tau >= 1, and 1 for tau = 0.

    Reference:
        Zhang, Gupta, Lian, Liu. Staleness-aware Async-SGD for Distributed Deep Learning.
        IJCAI 2016.
    """
    return _Curve("staleness_aware()", lambda tau: 1.0 / max(tau, 1))


def inverse() -> AgeCurve:
    """Return s(tau) = 1 / (1 + tau), a common variant of SA that also halves at tau = 1."""
    return _Curve("inverse()", lambda tau: 1.0 / (1.0 + tau))


def inverse_root() -> AgeCurve:
    """Return s(tau) = 1 / (1 + sqrt(tau)), as in NVIDIA FLARE's asynchronous aggregation."""
    return _Curve("inverse_root()", lambda tau: 1.0 / (1.0 + sqrt(tau)))
