"""One job of a node: a message, from its sending to its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple

from fedstale.errors import ProtocolError

FormatName = Literal["float16", "int8", "int4", "int2"]
"""Of quantised arrays, from fine to coarse; see `fedstale.strategies.messages`."""
Purpose = Literal["train", "evaluate", "query"]
PURPOSES: tuple[Purpose, ...] = ("train", "evaluate", "query")
MOST_REASON = 2000
"""Characters of a device's error that are kept."""
Ending = Literal["accepted", "rejected", "failed", "timed out", "cancelled"]


class RejectionError(ProtocolError):
    """A reply that may not touch the model."""

    def __init__(self, kind: str, text: str) -> None:
        """Set the kind, to count by, and the sentence."""
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Job:
    """One message to a node, on its way out until `message_id` is set, and then until its end."""

    node_id: int
    purpose: Purpose
    base_version: int
    """Version of the model that it carries."""
    job_id: int = -1
    """Counts up from 0 in the order of sending; sums run in this order."""
    message_id: str = ""
    """Empty until it is sent, or if it could not be."""
    sent_at: float = nan
    """Instant in s."""
    n_bytes: int = 0
    """Bytes of arrays of its message."""
    up: FormatName | None = None
    """Format that its reply is asked in; None for in full."""
    down: FormatName | None = None
    """Format of the model that it carries; None for in full."""
    upload: float = 1.0
    """Bytes of its reply over those of the node's reply before."""
    steps: float = nan
    """Local steps that its reply states; NaN where it states none, or was not asked to."""
    share: float = 1.0
    """Share of a whole job's steps that they are."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What stages keep with it, by the name of the stage, in plain values."""


class End(NamedTuple):
    """How a job ended."""

    how: Ending
    reason: str = ""
    """In words, where something went wrong."""
    facts: Mapping[str, float] = {}
    """What the server has learnt of the node by a good reply to a training, as in `Candidates`."""
