"""`Stage`: what happens to messages, replies and steps of a run besides merging.

A stage is to a server what a mod is to Flower's clients. Compression, local work, requests for
forecasts and the audit record are stages; a strategy has those that it is given, in their order,
and nothing of the others is on a job's path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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


class Pick(NamedTuple):
    """What a choice of nodes was made from, and what came of it."""

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


class Remade:
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
    """What happens to messages, replies and steps besides; a subclass overrides what it is about.

    A strategy copies its stages for each run, so attributes may hold what a run has learnt; those
    that `saved` names are in its checkpoints.
    """

    of_process: ClassVar[bool] = False
    """Whether it changes no model, so that a run may go on with another one, or without it."""
    is_fixed: ClassVar[bool] = False
    """Whether a run that goes on must have the same one, with the same settings."""
    bounds_norms: ClassVar[bool] = False
    """Whether it bounds the norms of updates itself, and `Validation` does not."""
    needs_start: ClassVar[bool] = False
    """Whether only `StaleStrategy.start` can keep it, and no loop of another strategy's."""
    is_last: ClassVar[bool] = False
    """Whether it comes behind all others: it gives messages the form in which they travel."""
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
        if state is not None:
            self.load_state_dict(state)

    def queries(self, candidates: Candidates, now: float) -> list[int]:
        """Return the nodes to ask before any candidate is picked, which waits for the answers."""
        return []

    def picked(self, pick: Pick) -> None:
        """Nodes were picked, by the selector to train or by chance to evaluate."""

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Return the content that is sent to a node.

        Args:
            job: not sent yet.
            content: which messages of a version share: what changes is put into another object.
        """
        return content

    def sent(self, jobs: Sequence[Job]) -> None:
        """Messages were handed to the grid at one instant; one that it did not take has no id."""

    def incoming(self, job: Job, content: RecordDict) -> None:
        """A reply of sound size has come, without an error.

        Raises:
            RejectionError: it may not touch the model.
        """

    def accepted(self, update: ClientUpdate) -> None:
        """The update of a reply was checked, and waits for a server step."""

    def weighing(self, update: ClientUpdate) -> None:
        """An update is about to be weighed; it may be changed in place."""

    def weighed(self, update: ClientUpdate) -> None:
        """An update was weighed, and is about to be added to the others; likewise."""

    def step(self, mean: Model, updates: Sequence[ClientUpdate]) -> None:
        """A buffer has become a mean, which is about to be a server step; likewise.

        Args:
            mean: change of the floating-point arrays.
            updates: behind it, without their arrays.
        """

    def metrics(self) -> dict[str, float]:
        """Return the stage's metrics of a step, by name."""
        return {}

    def ended(self, job: Job, end: End) -> None:
        """A job has ended, in whatever way; each job does once."""

    def left_out(self, update: ClientUpdate, reason: str) -> None:
        """The update of an accepted reply goes into no server step after all."""

    def end(self, problem: BaseException | None, version: int) -> None:
        """The run is over, by itself or by an exception, after some versions."""

    def summary(self) -> State:
        """Return the stage's part of the run's summary; empty for none."""
        return {}
