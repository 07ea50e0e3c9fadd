"""What a message costs a device: bytes both ways, and work, all known before any training runs.

Training is lazy, so a job's cost cannot be measured first. Work is examples x epochs x work per
example, as the app declares it; bytes are those of the serialised message. Nothing is guessed: what
is not declared and not yet known raises an error that names it.
"""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedstale.config import Costs
from fedstale.errors import ConfigError
from fedstale.strategies.server.validation import records_in
from fedstale.strategies.state import Stateful

# On the wire an array travels with its name, dtype and shape, and each record with a type and ids.
_ARRAY_OVERHEAD = 160
_RECORD_OVERHEAD = 120
_MESSAGE_OVERHEAD = 300


class CostBook(Stateful):
    """What is known of the cost of the next message, learnt from the replies that came back.

    Only delivered replies teach it, in the order of their delivery, so that a run does not depend
    on when or where training is really computed.
    """

    saved = ("_examples", "_sum", "_count", "_reply_bytes")

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._examples: dict[tuple[str, int], float] = {}
        self._sum: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._reply_bytes: dict[str, int] = {}

    def examples(self, kind: str, node_id: int) -> float:
        """Return the examples that a node is expected to use for a kind of message."""
        known = self._examples.get((kind, node_id))
        if known is not None:
            return known
        if kind in self._count:
            return self._sum[kind] / self._count[kind]
        if self.costs.examples is None:
            what = "number of examples of a client is unknown before its first reply"
            raise _undeclared(what, "examples")
        return self.costs.examples

    def work(self, kind: str, node_id: int) -> float:
        """Return the work of a message in work units.

        Raises:
            ConfigError: the app does not declare what the message needs.
        """
        if kind not in ("train", "evaluate"):
            # Apps with client_fn also request parameters and properties, which a device has.
            return self.costs.query_work
        name = "work_per_example" if kind == "train" else "evaluate_work_per_example"
        each, epochs = getattr(self.costs, name), self.costs.epochs if kind == "train" else 1
        if each is None:
            raise _undeclared(f"work of a {kind} message is unknown", name.replace("_", "-"))
        if not isinstance(epochs, int):
            raise _undeclared("number of epochs of a train message is unknown", "epochs")
        return float(each * epochs * self.examples(kind, node_id))

    def reply_bytes(self, kind: str, request: RecordDict, request_bytes: int) -> int:
        """Return the expected size of the reply to a message, in bytes.

        Until a reply of this kind has come back, training returns what it received, and every
        other reply has the size of the request without its arrays.

        Raises:
            ConfigError: the reply is the first model, and its size is not declared.
        """
        known = self._reply_bytes.get(kind)
        if known is not None:
            return known
        if kind == "train":
            return request_bytes
        if kind == "get_parameters":
            if self.costs.model_bytes is None:
                raise ConfigError(
                    "the size of the model is unknown before the first client has sent it: give "
                    "the strategy initial_parameters, or declare model-bytes in [tool.fedstale]"
                )
            return request_bytes + self.costs.model_bytes
        if self.costs.reply_bytes is not None:
            return self.costs.reply_bytes
        return _MESSAGE_OVERHEAD + sum(
            _record_bytes(r) for r in request.values() if not isinstance(r, ArrayRecord)
        )

    def learn(self, kind: str, node_id: int, reply: RecordDict) -> None:
        """Take note of a reply that was delivered."""
        self._reply_bytes[kind] = content_bytes(reply, self.costs.model_bytes)
        for record in records_in(reply, MetricRecord).values():
            # Clients made by client_fn spell it with an underscore, in a record of its own.
            examples = record.get("num-examples", record.get("num_examples"))
            if isinstance(examples, int | float) and 0 <= examples < np.inf:
                before = self._examples.get((kind, node_id))
                self._count[kind] = self._count.get(kind, 0) + (before is None)
                self._sum[kind] = self._sum.get(kind, 0.0) + examples - (before or 0.0)
                self._examples[(kind, node_id)] = float(examples)


def _undeclared(what: str, key: str) -> ConfigError:
    return ConfigError(
        f"the {what}: declare {key} in [tool.fedstale] of the app's pyproject.toml, or pass --{key}"
    )


def content_bytes(content: RecordDict, model_bytes: int | None = None) -> int:
    """Return the size of a message with this content on the wire, in bytes.

    Array data is counted exactly; names, shapes and envelopes by their typical size. A test holds
    the result within 10% of Flower's own serialisation for small models.

    Args:
        content: the records of the message.
        model_bytes: size that stands for all the arrays together; None counts them.
    """
    total = _MESSAGE_OVERHEAD
    for record in content.values():
        if model_bytes is not None and isinstance(record, ArrayRecord):
            total += model_bytes
        else:
            total += _record_bytes(record)
    return total


def _record_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    if isinstance(record, ArrayRecord):
        return _RECORD_OVERHEAD + sum(
            len(array.data) + len(name) + _ARRAY_OVERHEAD for name, array in record.items()
        )
    return _RECORD_OVERHEAD + sum(len(name) + 8 + _value_bytes(v) for name, v in record.items())


def _value_bytes(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(_value_bytes(v) for v in value)
    return 8
