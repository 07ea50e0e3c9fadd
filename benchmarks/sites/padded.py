"""Adapters of different ranks merged as padded factors, which products are compared with."""

from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.strategies import Stage
from fedstale.strategies.server import UPDATE_KEY
from fedstale.strategies.types import Job


class Padded(Stage):
    """Takes a reply of a lower rank for one of the full rank that has changed no more.

    The server's model holds the factors themselves, and a device has the first components of
    each. Cho, Liu, Xu, Fahrezi, Joshi. Heterogeneous LoRA for Federated Fine-tuning of On-Device
    Foundation Models. EMNLP 2024; without its pruning and weights.
    """

    requires = frozenset({"start"})

    def __init__(self) -> None:
        self._sent: dict[int, dict[str, Any]] = {}

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Note what is sent of a version; a run here has few."""
        if job.base_version not in self._sent:
            arrays = content.array_records["arrays"]
            self._sent[job.base_version] = {name: x.numpy() for name, x in arrays.items()}
        return content

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Turn the arrays of a reply into changes of the full factors."""
        changes = {}
        for name, stored in content.array_records["arrays"].items():
            new, before = stored.numpy(), self._sent[job.base_version][name]
            change = np.zeros_like(before)
            first = tuple(map(slice, new.shape))
            change[first] = new - before[first]
            changes[name] = FlowerArray(change)
        content["arrays"] = ArrayRecord(changes)
        content["padded"] = ConfigRecord({UPDATE_KEY: "delta"})
