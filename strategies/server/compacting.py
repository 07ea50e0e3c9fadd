"""The server's side of smaller messages: what each node is asked, and who can.

A node is asked for a format with its first message, and is sent quantised models once a reply has
said that it understands them. Each message says which reply of the node was the last to be
accepted: a device that rounds to the nearest owes what it left out of that one, and nothing of
replies that were lost.
"""

from flwr.app import Message, RecordDict

from fedstale.strategies.messages import (
    Asked,
    FormatName,
    Messages,
    is_quantised,
    is_stated,
    n_bytes,
)
from fedstale.strategies.server.jobs import SentJob
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.types import Forecast, Stateful


class CompactNodes(Stateful):
    """What the nodes of a run are asked, and what their replies have said."""

    saved = ("_able", "_accepted", "_last")

    def __init__(self, messages: Messages, versions: Versions, seed: int) -> None:
        """Know no node.

        Args:
            messages: the setting.
            versions: of the model.
            seed: of stochastic rounding.
        """
        self._messages, self._versions, self._seed = messages, versions, seed
        self._able: dict[int, None] = {}
        self._accepted: dict[int, str] = {}
        self._last: dict[int, FormatName | None] = {}
        """Format of the last reply of each node, to which its forecast applies."""
        self._sizes: dict[FormatName | None, int] = {}

    def asked(self, node_id: int, forecast: Forecast) -> tuple[Asked, FormatName | None]:
        """Return what a node is asked for next, and the format of the model that it is sent.

        Args:
            node_id: of the node.
            forecast: that it last reported of itself; empty if none.
        """
        up = self._messages.up_of(forecast, self._last.get(node_id), self.bytes_of)
        seed = self._seed if self._messages.stochastic else None
        down = self._messages.down if node_id in self._able else None
        return Asked(up, self._accepted.get(node_id, ""), seed), down

    def upload(self, node_id: int, up: FormatName | None) -> float:
        """Return the bytes of a node's next reply over those of its last one.

        Args:
            node_id: of the node.
            up: format of the next reply.
        """
        return self.bytes_of(up) / max(self.bytes_of(self._last.get(node_id)), 1)

    def content(
        self,
        asked: Asked,
        down: FormatName | None,
        full: RecordDict,
        keys: tuple[str, str],
    ) -> RecordDict:
        """Return the content of a message.

        Args:
            asked: of its node.
            down: format of the model.
            full: content with the current version in full.
            keys: names of the model and of the config in it.
        """
        content = RecordDict(dict(full))
        model, config = keys
        if down is not None:
            content[model] = self._versions.sent(self._versions.version, down)
        content[config] = asked.within(full.config_records[config])
        return content

    def bytes_of(self, form: FormatName | None) -> int:
        """Return the bytes of the numbers of a model in a format; None for in full."""
        if form not in self._sizes:
            current = self._versions.current
            arrays = current.on_devices() | current.counts
            self._sizes[form] = sum(
                n_bytes(form, x.size)
                if form is not None and is_quantised(form, x.dtype, x.shape)
                else x.nbytes
                for x in arrays.values()
            )
        return self._sizes[form]

    def heard(self, job: SentJob, reply: Message) -> None:
        """Take note of a reply to a training: its format, and whether its node understands any."""
        if is_stated(reply.content):
            self._able[job.node_id], self._last[job.node_id] = None, job.up
        else:
            self._able.pop(job.node_id, None)
            self._last.pop(job.node_id, None)

    def failed(self, node_id: int) -> None:
        """Take note of an error reply: the node may have lost the mod, and is asked again."""
        self._able.pop(node_id, None)

    def accepted(self, node_id: int, message_id: str) -> None:
        """Take note that an update waits for a server step."""
        self._accepted[node_id] = message_id

    def dropped(self, node_id: int, message_id: str) -> None:
        """Take note that an update was left out of its buffer after all."""
        if self._accepted.get(node_id) == message_id:
            del self._accepted[node_id]
