"""Compression: replies and models whose arrays are quantised on their way.

A node is asked for a format with its first message, and is sent quantised models once a reply has
said that it understands them. Each message says which reply of the node was the last to be
accepted: a device owes what rounding left out of that one, and nothing of replies that were lost.
"""

from collections.abc import Mapping, Sequence

from flwr.app import RecordDict

from fedstale.strategies.messages import Requested, is_stated
from fedstale.strategies.stages.base import Stage
from fedstale.strategies.types import ClientUpdate, End, FormatName, Job, Model, require


class Compression(Stage):
    """Quantises replies, models on their way to devices that train, or both.

    Devices need `CompressionMod`, or any mod of fedstale that has it; others are sent everything in
    full, and answer so. What devices evaluate is always in full. Numbers are rounded to the
    nearest, and what that leaves out of a reply goes into the node's next one.

    Args:
        up: format of replies; None leaves them in full.
        down: format of models; None sends them in full. The server keeps its model in full, and an
            update is a change of what was sent, so no error adds up.

    Example:
        >>> Compression("int4", down="int8")
        Compression(up='int4', down='int8')
        >>> Compression("int3")  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        fedstale.errors.ConfigError: strategy.Compression.up = 'int3': expected
        float16|int8|int4|int2, or None
    """

    requires = frozenset({"start"})
    saved = ("_able", "_accepted", "_last")

    def __init__(self, up: FormatName | None = None, *, down: FormatName | None = None) -> None:
        self.up, self.down = up, down
        accepted = "up or down to be a format (no such stage sends all in full)"
        require(up is not None or down is not None, "Compression", self, accepted)
        self._able: dict[int, None] = {}
        """Nodes that understand formats."""
        self._accepted: dict[int, str] = {}
        """Message behind the last reply of each node that was accepted."""
        self._last: dict[int, FormatName | None] = {}
        """Format of the last reply of each node, to which its forecast applies."""

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Ask a node that trains for a format, and send it the model in one if it can read it."""
        if job.purpose != "train":
            return content
        job.up, job.down = self.up, self.down if job.node_id in self._able else None
        last = self._run.bytes_in(self._last.get(job.node_id))
        job.upload = self._run.bytes_in(job.up) / max(last, 1)
        made = RecordDict(dict(content))
        if job.down is not None:
            made[self._run.arrays_key] = self._run.model_in(job.down)
        asked = Requested(self.up, self._accepted.get(job.node_id, ""))
        made[self._run.config_key] = asked.within(content.config_records[self._run.config_key])
        return made

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Note the format of a reply to a training, and whether its node understands any."""
        if job.purpose != "train":
            return
        if is_stated(content):
            self._able[job.node_id], self._last[job.node_id] = None, job.up
        else:
            self._able.pop(job.node_id, None)
            self._last.pop(job.node_id, None)

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Hint at a mod that no ClientApp has."""
        if not self._able:
            self._run.hint(
                "Compression: no device answers in a format, so all is sent in full: "
                "add CompressionMod() to the mods of the ClientApp, ClientApp(mods=[...])"
            )
        return {}

    def ended(self, job: Job, end: End) -> None:
        """Note the last counted update; send in full after an error, as the mod may be lost."""
        if end.how == "failed":
            self._able.pop(job.node_id, None)
        elif job.purpose == "train" and end.how == "accepted":
            self._accepted[job.node_id] = job.message_id
        elif end.how == "left out" and self._accepted.get(job.node_id) == job.message_id:
            del self._accepted[job.node_id]
