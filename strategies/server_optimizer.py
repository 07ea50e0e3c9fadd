"""What the server does with an aggregated update: one step of an optimizer on the global model.

The aggregated update d stands for the negative gradient. With `SGD(eta=1)` the model moves by
exactly d, which is FedAvg. The adaptive rules are those of Reddi et al.; `DelayAdaptive` lowers
the rate of any optimizer while updates are very stale. Symbols are those of Flower's strategies:
eta, beta_1, beta_2, tau.

Reference:
    Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification. 2019 (server momentum).
    Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization. ICML 2024
    (`DelayAdaptive`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import sqrt
from typing import Annotated, ClassVar

import numpy as np

from fedstale.strategies.types import (
    Array,
    Count,
    Decay,
    Model,
    Part,
    Positive,
    over_chunks,
    zeros_like,
)

Rate = Annotated[
    Positive | Callable[[int], float],
    "a finite number > 0, or a function of the number of the step",
]
"""A learning rate, or a function from the number of the step, from 1, to it."""


class ServerOptimizer(Part, ABC):
    """Steps a model in place, and holds its moments from step to step."""

    saved: ClassVar[tuple[str, ...]] = ("n_steps", "state")

    moments: tuple[str, ...] = ()
    """Names of its moments, each in the shape of the model."""

    def __init__(self, eta: Rate) -> None:
        """Start before the first step.

        Args:
            eta: learning rate, or a function from the number of the step, from 1, to it.
        """
        self.eta = eta
        self.damping = 1.0
        """What eta is multiplied by; see `DelayAdaptive`."""
        self.n_steps = 0
        self.state: dict[str, Model] = {}

    @property
    def rate(self) -> float:
        """Learning rate of the latest step, or of the first if there has been none."""
        eta = self.eta
        return self.damping * (eta(max(self.n_steps, 1)) if callable(eta) else eta)

    def step(self, model: Model, delta: Model, *, staleness: int = 0) -> None:
        """Move a model by an aggregated update, in place; the update is used up.

        Args:
            model: it is written to.
            delta: the aggregated update.
            staleness: of the stalest update in it, >= 0; only `DelayAdaptive` reads it.
        """
        if not self.state and self.moments:
            self.state = {moment: zeros_like(delta) for moment in self.moments}
        self.n_steps += 1
        memory = [self.state[moment] for moment in self.moments]
        over_chunks(self._step, delta, model, *memory)

    @abstractmethod
    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        """Step one chunk in place; d may be overwritten."""

    def reset(self) -> None:
        """Discard the moments, as after a step that had to be undone."""
        self.state = {}


class SGD(ServerOptimizer):
    """theta <- theta + eta d."""

    def __init__(self, eta: Rate = 1.0) -> None:
        """Step by the aggregated update itself at eta = 1."""
        super().__init__(eta)

    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        d *= d.dtype.type(self.rate)
        theta += d


class Momentum(ServerOptimizer):
    """v <- beta v + d; theta <- theta + eta v, or theta + eta (d + beta v) for Nesterov's.

    eta and beta are `server_learning_rate` and `server_momentum` of Flower's FedAvgM.
    """

    moments = ("v",)

    def __init__(self, eta: Rate = 1.0, *, beta: Decay = 0.9, nesterov: bool = False) -> None:
        """Set the momentum beta in [0, 1)."""
        super().__init__(eta)
        self.beta, self.nesterov = beta, nesterov

    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        (v,) = moments
        v *= v.dtype.type(self.beta)
        v += d
        step = d + v * v.dtype.type(self.beta) if self.nesterov else v.copy()
        step *= step.dtype.type(self.rate)
        theta += step


class _Adaptive(ServerOptimizer):
    """m <- beta_1 m + (1 - beta_1) d; theta <- theta + eta m / (sqrt(v) + tau)."""

    moments: tuple[str, ...] = ("m", "v")

    def __init__(
        self, eta: Rate = 0.1, *, beta_1: Decay = 0.9, beta_2: Decay = 0.99, tau: Positive = 1e-3
    ) -> None:
        """Set the decays of both moments in [0, 1), and tau > 0, which bounds the adaptivity."""
        super().__init__(eta)
        self.beta_1, self.beta_2, self.tau = beta_1, beta_2, tau

    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        m, *seconds = moments
        number = m.dtype.type
        m *= number(self.beta_1)
        m += number(1 - self.beta_1) * d
        d *= d
        step = np.sqrt(self._second_moment(d, *seconds))
        step += number(self.tau)
        np.divide(m, step, out=step)
        step *= number(self._corrected_rate())
        theta += step

    @abstractmethod
    def _second_moment(self, square: Array, *seconds: Array) -> Array:
        """Update the moments after m in place with d^2; return the one under the root."""

    def _corrected_rate(self) -> float:
        return self.rate


class Adam(_Adaptive):
    """v <- beta_2 v + (1 - beta_2) d^2, with eta corrected for the bias of both moments.

    Differences from the paper:
        The bias correction uses the exponent t + 1 in step t, as Flower's FedAdam does.
    """

    def _second_moment(self, square: Array, *seconds: Array) -> Array:
        (v,) = seconds
        v *= v.dtype.type(self.beta_2)
        square *= square.dtype.type(1 - self.beta_2)
        v += square
        return v

    def _corrected_rate(self) -> float:
        t = self.n_steps + 1
        return self.rate * sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)


class AMSGrad(_Adaptive):
    """v as in Adam, v_max <- max(v_max, v); theta <- theta + eta m / (sqrt(v_max) + tau).

    The moments are not corrected for their bias; the code of the authors of FADAS does that.

    Reference:
        Reddi, Kale, Kumar. On the Convergence of Adam and Beyond. ICLR 2018.
        Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization.
        ICML 2024.
    """

    moments = ("m", "v", "v_max")

    def _second_moment(self, square: Array, *seconds: Array) -> Array:
        v, v_max = seconds
        v *= v.dtype.type(self.beta_2)
        square *= square.dtype.type(1 - self.beta_2)
        v += square
        return np.maximum(v_max, v, out=v_max)


class Yogi(_Adaptive):
    """v <- v - (1 - beta_2) d^2 sign(v - d^2)."""

    def __init__(
        self, eta: Rate = 0.01, *, beta_1: Decay = 0.9, beta_2: Decay = 0.99, tau: Positive = 1e-3
    ) -> None:
        """Set the decays and tau as for Adam."""
        super().__init__(eta, beta_1=beta_1, beta_2=beta_2, tau=tau)

    def _second_moment(self, square: Array, *seconds: Array) -> Array:
        (v,) = seconds
        sign = np.sign(v - square)
        square *= square.dtype.type(1 - self.beta_2)
        square *= sign
        v -= square
        return v


class Adagrad(_Adaptive):
    """v <- v + d^2, without momentum unless beta_1 is given."""

    def __init__(self, eta: Rate = 0.1, *, beta_1: Decay = 0.0, tau: Positive = 1e-3) -> None:
        """Set the decay of the first moment, and tau as for Adam."""
        super().__init__(eta, beta_1=beta_1, beta_2=0.0, tau=tau)

    def _second_moment(self, square: Array, *seconds: Array) -> Array:
        (v,) = seconds
        v += square
        return v


class DelayAdaptive(ServerOptimizer):
    """FADAS: lowers the rate of an optimizer while the stalest update of a step is beyond tau_c.

    With tau_max the largest staleness in the buffer, the rate is that of the optimizer as long as
    tau_max <= tau_c, and eta / tau_max beyond. Moments take in every aggregated update alike.

    Differences from the paper:
        As others give its rule, the rate beyond is min(eta, 1 / tau_max), which does nothing as
        long as eta is below 1 / tau_max; this is what the authors' code does.

    Checked: the rule and tau_c = 1 in the authors' code.
    Not checked: the paper's text.

    Reference:
        Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization.
        ICML 2024.

    Example:
        >>> optimizer = DelayAdaptive(SGD(1.0), tau_c=2)
        >>> theta = {"w": np.zeros(1)}
        >>> for staleness in (0, 2, 4):
        ...     optimizer.step(theta, {"w": np.ones(1)}, staleness=staleness)
        ...     print(theta["w"], optimizer.rate)
        [1.] 1.0
        [2.] 1.0
        [2.25] 0.25
    """

    saved = ("optimizer",)

    def __init__(self, optimizer: ServerOptimizer, tau_c: Count = 1) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: makes the steps.
            tau_c: largest staleness that leaves the rate alone, an integer >= 1.
        """
        self.optimizer, self.tau_c = optimizer, tau_c

    @property
    def rate(self) -> float:
        """Learning rate of the latest step."""
        return self.optimizer.rate

    def step(self, model: Model, delta: Model, *, staleness: int = 0) -> None:
        """Step by the optimizer at a rate that suits the staleness."""
        self.optimizer.damping = 1.0 if staleness <= self.tau_c else 1.0 / staleness
        self.optimizer.step(model, delta, staleness=staleness)

    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        self.optimizer._step(d, theta, *moments)

    def reset(self) -> None:
        """Discard the optimizer's moments."""
        self.optimizer.reset()
