"""FADAS: an adaptive server optimizer that steps carefully when a merge holds a very late update.

Reference:
    Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization. ICML 2024.
"""

from collections.abc import Mapping
from typing import Literal

from fedstale.strategies.arrays import Array, Model
from fedstale.strategies.server_optimizer import AMSGrad, Rate, ServerOptimizer
from fedstale.strategies.settings import is_count, require

Beyond = Literal["divide", "cap"]


class DelayAdaptive(ServerOptimizer):
    """Lowers the rate of another optimizer while the stalest update of a merge is beyond tau_c.

    With tau_max the largest staleness in the merge, the rate is that of the optimizer as long as
    tau_max <= tau_c. Beyond,

        eta_t = eta / tau_max          beyond="divide", the authors' code,
        eta_t = min(eta, 1 / tau_max)  beyond="cap", the paper.

    "cap" does nothing as long as eta is below 1 / tau_max, which rates of adaptive optimizers
    mostly are. Moments take in every merge alike.

    Checked: "divide" and tau_c = 1 in the authors' code; "cap" in a third party's summary of the
    paper.
    Not checked: the paper's text.

    Example:
        >>> import numpy as np
        >>> from fedstale.strategies.server_optimizer import SGD
        >>> optimizer = DelayAdaptive(SGD(1.0), tau_c=2)
        >>> theta = {"w": np.zeros(1)}
        >>> for staleness in (0, 2, 4):
        ...     optimizer.step(theta, {"w": np.ones(1)}, staleness=staleness)
        ...     print(theta["w"], optimizer.rate)
        [1.] 1.0
        [2.] 1.0
        [2.25] 0.25
    """

    def __init__(
        self, optimizer: ServerOptimizer, tau_c: int = 1, *, beyond: Beyond = "divide"
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: makes the steps.
            tau_c: largest staleness that leaves the rate alone, an integer >= 1.
            beyond: "divide" or "cap"; see the class.
        """
        require(is_count(tau_c), "server_optimizer.tau_c", tau_c, "an integer >= 1")
        require(beyond in {"divide", "cap"}, "server_optimizer.beyond", beyond, "divide|cap")
        self.optimizer, self.tau_c, self.beyond = optimizer, tau_c, beyond

    @property
    def rate(self) -> float:
        """Learning rate of the latest step."""
        return self.optimizer.rate

    def rate_at(self, step: int) -> float:
        """Return the rate that the optimizer asks for in a step."""
        return self.optimizer.rate_at(step)

    def step(self, model: Model, delta: Model, *, staleness: int = 0) -> None:
        """Step by the optimizer at a rate that suits the staleness."""
        self.optimizer.damping = self._damping(staleness)
        self.optimizer.step(model, delta, staleness=staleness)

    def _damping(self, staleness: int) -> float:
        if staleness <= self.tau_c:
            return 1.0
        if self.beyond == "divide":
            return 1.0 / staleness
        eta = self.optimizer.rate_at(self.optimizer.n_steps + 1)
        return min(1.0, 1.0 / (staleness * eta))

    def _step(self, theta: Array, d: Array, *moments: Array) -> None:
        self.optimizer._step(theta, d, *moments)

    def reset(self) -> None:
        """Forget the past."""
        self.optimizer.reset()

    def state_dict(self) -> dict[str, Array | float]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Array | float]) -> None:
        """Continue from a checkpoint."""
        self.optimizer.load_state_dict(state)

    def __repr__(self) -> str:
        return f"DelayAdaptive({self.optimizer!r}, tau_c={self.tau_c}, beyond={self.beyond!r})"


def fadas(rate: Rate = 0.1, tau_c: int = 1, *, beyond: Beyond = "divide") -> DelayAdaptive:
    """Return FADAS' server optimizer: AMSGrad whose rate adapts to the delay."""
    return DelayAdaptive(AMSGrad(rate), tau_c, beyond=beyond)
