"""`Stage`: what happens to messages, replies and steps of a run besides merging.

A stage is to a server what a mod is to Flower's clients. Compression, local work, requests for
forecasts and the audit record are stages; a strategy has those that it is given, in their order,
and nothing of the others is on a job's path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from flwr.app import ArrayRecord, RecordDict

from fedstale.strategies.types import (
    Candidates,
    ClientUpdate,
    End,
    FormatName,
    History,
    Job,
    Model,
    NodeSet,
    Part,
    Purpose,
    SelectionContext,
    State,
)

if TYPE_CHECKING:
    from fedstale.strategies.server import StaleStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """What a stage may know of its run."""

    seed: int
    """Of all choices of the strategy."""
    now: Callable[[], float]
    """Returns the instant in s."""
    history: History
    """What the server knows of nodes."""
    arrays_key: str
    """Name of the ArrayRecord with the model, in messages."""
    config_key: str
    """Name of the ConfigRecord in messages."""
    bytes_in: Callable[[FormatName | None], int]
    """Returns the bytes of the current model's numbers in a format; None for in full."""
    model_in: Callable[[FormatName], ArrayRecord]
    """Returns the current model in a format, as it is sent."""
    about: State
    """Class of the strategy, its settings, and its selector, as text."""
    folder: Path | None
    """Of the run, if it has one."""
    is_resumed: bool
    """Whether it goes on from a checkpoint, which may be of a run without this stage."""
    may_resume: bool
    """Whether the run was asked to go on from checkpoints, although there may be none yet."""
    repeats: bool
    """Whether a run that goes on from a checkpoint repeats what followed it to the byte, as a
    simulation does."""
    earlier: Sequence["Stage"]
    """Stages of the strategies that ran before in the same run."""
    on_pick: list[Callable[["Pick"], None]]
    """Called with each choice of nodes."""
    on_end: list[Callable[[BaseException | None, int], None]]
    """Called when the run is over, with the exception that ended it and its last version."""
    hint: Callable[[str], None]
    """Says once, in the log and in the summary, what is not as it was meant."""
    summary: dict[str, object]
    """Of the run, to which a stage may add."""


Requirement = Literal["start", "last", "own norms", "same settings", "any settings"]
"""What a stage may require:

- "start": that `StaleStrategy.start` runs the rounds, and no loop of another strategy's;
- "last": to come behind all others, since it gives messages the form in which they travel;
- "own norms": that `Validation` leaves the norms of updates to it;
- "same settings": that a run which goes on has the same one;
- "any settings": that a run may go on with another one or without it, as it changes no model.
"""


class Pick(NamedTuple):
    """A choice of nodes: candidates, circumstances and result."""

    purpose: Purpose
    free: NodeSet
    """The candidates; in ascending order, for training."""
    k: int
    """How many were to be picked."""
    chosen: list[int]
    """Ids of nodes."""
    context: SelectionContext
    """Where the run stands."""
    drawn_from: Mapping[str, Any]
    """State of the generator before it was drawn from."""


class SharedContent:
    """What was made of the last content, so that messages that share it share this, too."""

    def __init__(self) -> None:
        """Start with none."""
        self._content: RecordDict | None = None
        self._made: dict[object, RecordDict] = {}

    def of(
        self, content: RecordDict, make: Callable[[RecordDict], None], key: object = None
    ) -> RecordDict:
        """Return a copy of a content with other records in it; one for each key.

        Args:
            content: which stays as it is.
            make: puts the other records into the copy.
            key: what they depend on besides.
        """
        if self._content is not content:
            self._content, self._made = content, {}
        if key not in self._made:
            copy = RecordDict(dict(content))
            make(copy)
            self._made[key] = copy
        return self._made[key]


class Stage(Part):
    """Follows messages, replies and steps; a subclass overrides some of eight hooks.

    A strategy copies its stages for each run, so attributes may hold what a run has learnt; those
    that `saved` names are in its checkpoints.
    """

    requires: ClassVar[frozenset[Requirement]] = frozenset()
    """What it needs of the strategy and of a run that goes on."""
    query: ClassVar[str] = ""
    """Type of the query messages that it asks for; one stage of a strategy may."""
    wait_s: float = inf
    """Longest wait in s for the answers to its queries."""

    @property
    def name(self) -> str:
        """Under which it keeps its notes and its state; a strategy has one stage of a name."""
        return type(self).__name__

    def check(self, strategy: "StaleStrategy") -> None:
        """Raise ConfigError if it does not go together with the other settings of a strategy."""

    def begin(self, run: StageRun, state: Mapping[str, Any] | None) -> None:
        """Prepare for a run.

        Args:
            run: what it may know of it.
            state: what `state_dict` returned in the run that goes on; None for none.
        """
        self._run = run
        if state is not None:
            self.load_state_dict(state)

    def queries(self, candidates: Candidates, now: float) -> list[int]:
        """Return the nodes to ask before any candidate is picked, which waits for the answers."""
        return []

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Return the content that is sent to a node.

        Args:
            job: not sent yet.
            content: which messages of a version share: what changes is put into another object.
        """
        return content

    def incoming(self, job: Job, content: RecordDict) -> None:
        """A reply of sound size has come, without an error.

        Raises:
            RejectionError: it may not touch the model.
        """

    def accepted(self, update: ClientUpdate) -> None:
        """An update is on its way into a server step, and may be changed in place.

        It is called before the update is weighed, and after that, when it has a `weight`.
        """

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> Mapping[str, float]:
        """Return metrics of a server step that is about to be made of a mean; likewise.

        Args:
            mean: change of the floating-point arrays.
            updates: behind it, without their arrays.
        """
        return {}

    def ended(self, job: Job, end: End) -> None:
        """A job that `outgoing` was given has ended, in whatever way.

        Each does once, but for an accepted one whose update is "left out" of a step later.
        """
