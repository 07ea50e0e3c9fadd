"""What an update itself tells of how badly a device's data are learnt, if losses are not believed.

The norm is `Validation(loss_from="norm")`; what stands here was tried beside it. None of it depends
on a number that devices state.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from training_apps import TrainingApp

from fedstale.strategies.server.reputation import Losses, Reputation
from fedstale.strategies.types import ClientUpdate, Model
from fedstale.traces.arrays import Array

Loss = Callable[[ArrayRecord], float]
"""Loss of a model on a public batch."""
NODES = 20
"""Last updates, one of a node, whose mean is the direction that the fleet takes."""
EVIDENCE = ("alignment", "public loss", "public gain")


def public_loss(app: TrainingApp, seed: int) -> Loss:
    """Return the mean loss over the groups of the test set, which stands for a public batch."""
    return lambda arrays: float(app.evaluate(arrays, seed)[1].mean())


class Evidence:
    """Looks at the updates of one run, in their order."""

    def __init__(self, public: Loss) -> None:
        """Set the public batch."""
        self._public = public
        self._last: OrderedDict[int, Array] = OrderedDict()

    def of(self, update: ClientUpdate) -> dict[str, float]:
        """Return what tells of the loss of a device, the larger the worse its data are learnt.

        Returns:
            alignment: 1 - cosine of the update with the mean of the last ones of `NODES` others,
                from 0 to 2; 1 while there is none. public loss: that of the model that the device
                sent, on the public batch. public gain: by how much the update lowers that loss,
                at least 0.
        """
        flat = np.concatenate([x.ravel() for x in update.delta.values()]).astype(np.float64)
        self._last.pop(update.node_id, None)
        mean = np.mean(list(self._last.values()), axis=0) if self._last else np.zeros_like(flat)
        length = float(np.linalg.norm(flat) * np.linalg.norm(mean))
        self._last[update.node_id] = flat
        if len(self._last) > NODES:
            self._last.popitem(last=False)
        moved = {name: base + update.delta[name] for name, base in update.base.items()}
        after = self._public(_record(moved))
        return {
            "alignment": 1.0 - float(flat @ mean) / length if length else 1.0,
            "public loss": after,
            "public gain": max(self._public(_record(update.base)) - after, 0.0),
        }


def _record(model: Model) -> ArrayRecord:
    return ArrayRecord(OrderedDict((name, FlowerArray(x)) for name, x in model.items()))


@contextmanager
def taken(name: str, public: Loss) -> Iterator[None]:
    """Let the servers of one run give selectors some evidence in the place of stated losses."""
    evidence = Evidence(public)

    def losses(
        self: Reputation, update: ClientUpdate, *, stated: float, stated_square: float
    ) -> Losses:
        return Losses(evidence.of(update)[name], float("nan"))

    with losses_by(losses):
        yield


@contextmanager
def losses_by(losses: Callable[..., Losses]) -> Iterator[None]:
    """Let `Reputation` take losses in another way."""
    plain = Reputation.losses
    Reputation.losses = losses  # type: ignore[method-assign]
    try:
        yield
    finally:
        Reputation.losses = plain  # type: ignore[method-assign]
