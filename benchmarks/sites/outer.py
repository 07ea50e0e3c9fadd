"""Outer optimizers that are compared with those of fedstale, and are no part of it."""

import numpy as np

from fedstale.strategies.server_optimizer import Momentum, Rate, ServerOptimizer
from fedstale.strategies.types import Array, Model


class DelayedNesterov(ServerOptimizer):
    """Takes each update at once, and Nesterov's momentum once every N updates.

    With s the sum of the updates since momentum was refreshed, N updates after which it is, and
    momentum spread over as many steps,

        theta <- theta + eta (d + beta v) / N     in each step,
        v <- beta v + s / N, s <- 0               after every N-th.

    Liu et al. Asynchronous Local-SGD Training for Language Modeling. 2024 (arXiv 2401.09135), with
    c = 1/N. Not checked: the paper's text.
    """

    moments = ("v", "s")

    def __init__(self, eta: Rate = 0.7, *, beta: float = 0.9, every: int = 12) -> None:
        super().__init__(eta)
        self.beta, self.every = beta, every

    def _step(self, d: Array, theta: Array, *moments: Array) -> None:
        v, s = moments
        number, share = v.dtype.type, self.rate / self.every
        s += d
        if self.n_steps % self.every == 0:
            v *= number(self.beta)
            v += s / number(self.every)
            s[:] = 0
        theta += number(share) * (d + number(self.beta) * v)


class AlignedMomentum(Momentum):
    """Takes from a stale update, array by array, what points against the momentum.

    The idea of HeLoCo (arXiv 2606.00271), whose own correction shrinks it; not checked: its text.
    """

    def step(self, model: Model, delta: Model, *, staleness: int = 0) -> None:
        """Move a model by an aggregated update, in place; the update is used up."""
        for name, v in self.state.get("v", {}).items() if staleness else ():
            d = delta[name]
            along, square = float(np.vdot(d, v)), float(np.vdot(v, v))
            if along < 0.0 < square:
                d -= d.dtype.type(along / square) * v
        super().step(model, delta, staleness=staleness)
