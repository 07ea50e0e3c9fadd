"""AsyncFedED: staleness is the distance that the model has moved, in lengths of the update."""

from math import sqrt

from fedstale.strategies.types import (
    ClientUpdate,
    inner,
    over_chunks,
    require,
    scale,
    square_distance,
)
from fedstale.strategies.weighting.base import Weighting


class EuclideanStaleness(Weighting):
    """Weighs an update by 1 / (1 + gamma / epsilon), gamma = |theta_now - theta_base| / |delta|.

    The paper steps by eta = lambda / (gamma + epsilon) times one update. This is that rule, split
    into a server rate of lambda / epsilon and a weight that is 1 where the model has not moved.
    Unlike `Gap`, it knows no typical step: a short update is stale however little the model moved.

    Differences from the paper:
        It composes with any buffer size; the paper applies one update at a time.
        The number of local steps stays what the client makes it. In the paper the server adapts
        it, K <- K + floor(kappa (gamma_target - gamma)), to bring gamma to a target.
        An update of zeros has weight 1, or that of an infinite gamma, 0, if the model has moved.

    Checked: gamma, eta and the rule for K, in a third party's implementation.
    Not checked: the paper's text and its constants; lambda = epsilon = 1 are ours.

    Reference:
        Wang, Yang, He, Shi, Chen. AsyncFedED: Asynchronous Federated Learning with Euclidean
        Distance based Adaptive Weight Aggregation. 2022.

    Example:
        >>> import numpy as np
        >>> update = ClientUpdate(
        ...     delta={"w": np.array([0.0, 1.0])},
        ...     base={"w": np.array([0.0, 0.0])},
        ...     current={"w": np.array([3.0, 0.0])},
        ...     staleness=2,
        ... )
        >>> EuclideanStaleness(epsilon=1.0).weigh(update)
        0.25
    """

    from_update_alone = True

    def __init__(self, epsilon: float = 1.0) -> None:
        """Set epsilon > 0: an update counts half once the model has moved epsilon of its length."""
        require(epsilon > 0, "weighting.epsilon", epsilon, "a number > 0")
        self.epsilon = epsilon

    def weigh(self, update: ClientUpdate) -> float:
        """Scale the whole update; see the class."""
        if update.staleness == 0:
            return 1.0
        moved = sqrt(square_distance(update.current, update.base))
        length = sqrt(sum(over_chunks(lambda d: inner(d, d), update.delta)))
        reach = self.epsilon * length
        weight = reach / (moved + reach) if moved > 0.0 else 1.0
        scale(update.delta, weight)
        return weight
