"""One client's update, from validation to the server step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Self

from fedstale.strategies.types.arrays import Model


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
