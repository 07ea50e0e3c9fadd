"""One job of a node, from its message to its end, and the update that its reply brings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple, Self

from fedstale.errors import ProtocolError
from fedstale.strategies.types.arrays import Model

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


@dataclass(slots=True, kw_only=True, eq=False)
class ClientUpdate:
    """One client's update on its way from validation to the server step.

    `Validation` makes it, `Reputation` limits it, a `Weighting` scales it, and the `Buffer` reduces
    it and then empties its arrays. A weighting reads the first five fields; the others have
    defaults, so that a weighting can be tried by hand.
    """

    delta: Model
    """What the client changed, weights after minus weights received; a weighting scales it."""
    base: Model
    """The model version that the client received; never written to."""
    current: Model
    """The model version that the update is applied to; never written to."""
    staleness: int
    """Versions between the two, >= 0."""
    node_id: int = 0
    """The node that sent it."""
    message_id: str = ""
    """The message that it answers, which is the identity of its job."""
    job_id: int = 0
    """Order in which its job was sent; sums run in this order."""
    base_version: int = 0
    """Number of the version that the client received."""
    counts: Model = field(default_factory=dict)
    """Change of the integer arrays, in float64; never scaled."""
    examples: float = 1.0
    """Number of examples behind the update, > 0, as far as the cap allows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the client measured; without the number of examples."""
    steps: float = nan
    """Local steps behind the update, as its reply states them; NaN where it does not."""
    share: float = 1.0
    """Share of a whole job's steps that they are."""
    norm: float = nan
    """Euclidean norm of the change of the float arrays, as it was received."""
    limited: bool = False
    """Whether examples and norm are within the caps; see `Reputation`."""
    weight: float = nan
    """What the weighting returned; NaN until then."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; the current version is in it already."""
        state = {name: getattr(self, name) for name in self.__slots__ if name != "current"}
        return state | {"base": self.base if self.staleness else {}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], current: Model) -> Self:
        """Return an update from what `state_dict` returned, on the same current version."""
        base = state["base"] if state["staleness"] else current
        return cls(**{**state, "base": base, "current": current})
