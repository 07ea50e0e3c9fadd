"""The last update of each client, cached: clients that are not in a buffer count all the same.

Which clients answer is chance, and skewed. A mean over the clients of a buffer S differs from the
mean over all clients, and the cached updates show by how much:

    u = mean over S of delta_i + beta (H - mean over S of h_i),

with h_i the last update of client i and H their mean over all. beta = 1 is the update of CA2FL and
FedVARP, 0 < beta < 1 that of FedStale, and beta = 0 leaves every update as it is.

Reference:
    Wang, Cao, Wu, Chen, Chen. Tackling the Data Heterogeneity in Asynchronous Federated Learning
    with Cached Update Calibration. ICLR 2024 (CA2FL).
    Rodio, Neglia. FedStale: Leveraging Stale Client Updates in Federated Learning. ECAI 2024.
    Jhunjhunwala et al. FedVARP: Tackling the Variance Due to Partial Client Participation in
    Federated Learning. UAI 2022.
"""

from collections.abc import Sequence

import numpy as np

from fedstale.strategies.types import ClientUpdate, Count, Model, Share, chunks, copy_of, zeros_like
from fedstale.strategies.weighting.base import ByAge, Weighting, constant


class CachedUpdates(Weighting):
    """Moves each update by beta (H - h_i): a buffer's mean is then that of the module's formula.

    All updates of a buffer are calibrated by what was cached when it opened, and are cached, as
    they came, when it has become a step. If a client is in a buffer twice, its second update
    replaces the first. `then` weighs the calibrated updates, and its weight is returned.

    A client without a cached update is not calibrated, and H is the mean over the cached ones.
    Given `n_clients`, both are the papers': H is the sum over the cached updates divided by
    `n_clients`, and a missing one is an update of zeros.

    This is no discount on age: updates that are not stale change too. What holds instead: the first
    step is that of `then` to the last bit, every step is for beta = 0, and for `n_clients` or
    equal weights a step from all clients, once each, is that of `then` within rounding.

    Memory: `most_clients` models, with one sum in float64. Beyond, the client that has not been
    heard for longest is forgotten, as if it had never answered; its part of H is then lost, so a
    limit below the number of clients that take part leaves out those that need it most.

    Differences from the papers:
        All clients count alike; FedStale and FedVARP weigh them by their examples and divide by
        each one's probability to take part. Use `normalise="buffer_size"`: H is no mean by
        examples.
        CA2FL starts from zeros and divides by the number of all clients, which is `n_clients`.

    Checked: the formula for beta = 1 in third parties' implementations of CA2FL; that for FedStale
    in the authors' code.
    Not checked: the papers' text.

    Example:
        >>> cache = CachedUpdates(beta=1.0)
        >>> theta = {"w": np.zeros(1)}
        >>> def weigh(node_id, delta):
        ...     delta = {"w": np.array([delta])}
        ...     rest = dict(base=theta, current=theta, staleness=0)
        ...     cache.weigh(ClientUpdate(delta=delta, node_id=node_id, **rest))
        ...     return delta["w"]
        >>> weigh(1, 2.0), weigh(2, 6.0)
        (array([2.]), array([6.]))
        >>> cache.observe(theta, theta, 1.0)
        >>> weigh(1, 3.0), weigh(3, 5.0)
        (array([5.]), array([5.]))
    """

    saved = ("_sum", "_cached", "_coming", "then")

    def __init__(
        self,
        beta: Share = 1.0,
        *,
        then: Weighting | None = None,
        n_clients: Count | None = None,
        most_clients: Count = 1000,
    ) -> None:
        """Start with an empty cache.

        Args:
            beta: how far cached updates count, in [0, 1].
            then: weighs the calibrated updates; if not given, age does not matter.
            n_clients: number of clients in all, if it is known; >= 1.
            most_clients: clients to cache updates of, >= 1.
        """
        self.beta, self.then = beta, then or ByAge(constant())
        self.needs_whole_buffer = self.then.needs_whole_buffer
        self.n_clients, self.most_clients = n_clients, most_clients
        self._sum: Model = {}
        self._cached: dict[int, Model] = {}
        self._coming: dict[int, Model] = {}

    def weigh(self, update: ClientUpdate) -> float:
        """Calibrate an update in place, and return the weight that `then` gives it."""
        self._calibrate(update)
        return self.then.weigh(update)

    def weigh_stale(self, stale: Sequence[ClientUpdate], current_mean: Model) -> list[float]:
        """Calibrate stale updates in place, and weigh them together."""
        for update in stale:
            self._calibrate(update)
        return self.then.weigh_stale(stale, current_mean)

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """Cache the updates of the buffer that made this step."""
        for node_id, stored in self._coming.items():
            self._keep(node_id, stored)
        self._coming = {}
        self.then.observe(before, after, rate)

    def discard(self) -> None:
        """Forget the updates of a buffer that made no step."""
        self._coming = {}
        self.then.discard()

    def _calibrate(self, update: ClientUpdate) -> None:
        if self.beta == 0.0:
            return
        # Copied before it is calibrated; its place in the order of those heard is the newest.
        self._coming.pop(update.node_id, None)
        self._coming[update.node_id] = copy_of(update.delta)
        own = self._cached.get(update.node_id, {})
        if not self._cached or not (own or self.n_clients):
            return
        share = self.beta / max(self.n_clients or 0, len(self._cached))
        for name, delta in update.delta.items():
            for d, total, h in chunks(delta, self._sum[name], own.get(name, delta)):
                shift = share * total
                if own:
                    shift -= np.multiply(h, self.beta, dtype=np.float64)
                np.add(d, shift, out=d, casting="same_kind")

    def _keep(self, node_id: int, stored: Model) -> None:
        self._sum = self._sum or zeros_like(stored, np.float64)
        self._forget(node_id)
        self._cached[node_id] = stored
        self._add(stored, 1.0)
        while len(self._cached) > self.most_clients:
            self._forget(next(iter(self._cached)))

    def _forget(self, node_id: int) -> None:
        if node_id in self._cached:
            self._add(self._cached.pop(node_id), -1.0)

    def _add(self, stored: Model, sign: float) -> None:
        for name, array in stored.items():
            for total, h in chunks(self._sum[name], array):
                np.add(total, np.multiply(h, sign, dtype=np.float64), out=total)
