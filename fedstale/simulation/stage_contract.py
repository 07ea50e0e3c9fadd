"""`check_stage`: whether a stage keeps the contract of `Stage`, tried in small simulations."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale.config import Costs
from fedstale.errors import ConfigError
from fedstale.flower import ErrorCode
from fedstale.simulation.executors import ClientCall, ClientReply, InlineExecutor
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.server import StaleStrategy
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import Array, Job
from fedstale.traces import TraceSet

_N_NODES, _N_VERSIONS = 3, 6
_BAD: Mapping[str, Callable[[], RecordDict | Error]] = {
    "1": lambda: Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "an error that check_stage makes"),
    "3": RecordDict,
}
"""What one client replies with at some versions."""
Models = dict[int, dict[str, Array]]


def check_stage(
    make: Callable[..., StaleStrategy], client: ClientApp, initial: ArrayRecord
) -> None:
    """Run a strategy with a stage, also with bad replies, stopped and resumed; raise what is wrong.

    Args:
        make: returns a strategy that has the stage and waits for all nodes; it is given options of
            its own: `lambda **options: FedAvg(stages=[Mine()], **options)`.
        client: answers three nodes; its replies follow from messages and contexts alone.
        initial: version 0 of the model.

    Raises:
        ConfigError: the stage changes a content that messages share, or is itself changed by a run;
            it does otherwise in a second run, or in one that goes on from a checkpoint. What the
            stage raises itself, as because of a reply without records, is raised as it is.
    """
    strategy = make()
    before = [repr(vars(stage)) for stage in strategy.stages]
    strategy.stages = (_SharedContent(), *strategy.stages)
    whole = _run(strategy, _grid(client), initial)
    if before != [repr(vars(stage)) for stage in strategy.stages[1:]]:
        raise ConfigError(
            "a run has changed the stage of the strategy, and not only its own copy: expected "
            "attributes that deepcopy copies"
        )
    _run(make(), _grid(client), initial, fails_at=_N_VERSIONS // 2)
    _compare(whole, _run(make(), _grid(client), initial), "in a second run")
    for n in range(1, _N_VERSIONS):
        with TemporaryDirectory() as folder:
            grid = _grid(client)
            first = _run(make(checkpoints=Path(folder)), grid, initial, n)
            rest = _run(make(resume=Path(folder)), grid, initial)
        _compare(whole, first | rest, f"in a run that goes on from version {n}")


class _SharedContent(Stage):
    """Stands before the others, and sees whether one of them has changed what it was given."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[RecordDict, object]] = {}

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Compare a content with what it was when the first message was made of it."""
        now = {name: dict(record) for name, record in content.items()}
        if self._contents.setdefault(id(content), (content, now))[1] != now:
            raise ConfigError(
                "outgoing has changed the content that it was given, which messages share: "
                "expected another RecordDict"
            )
        return content


class _SomeBad(InlineExecutor):
    """Runs a client, but for an error and an empty reply of the first node."""

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls."""
        return [self._bad(call) or super(_SomeBad, self).run([call])[0] for call in calls]

    @staticmethod
    def _bad(call: ClientCall) -> ClientReply | None:
        about, place = call.message.metadata, call.context.node_config["partition-id"]
        what = _BAD.get(about.group_id) if about.message_type == "train" and place == 0 else None
        return what and ClientReply(Message(what(), reply_to=call.message), call.context)


class _StopHere(Exception):  # noqa: N818 - nothing is wrong
    """Ends a run from outside."""


def _grid(client: ClientApp) -> TraceGrid:
    return TraceGrid(
        TraceSet.ideal(_N_NODES),
        _SomeBad(client),
        costs=Costs(),
        work=lambda message: 1.0,
    )


def _run(
    strategy: StaleStrategy,
    grid: TraceGrid,
    initial: ArrayRecord,
    n: int = _N_VERSIONS,
    *,
    fails_at: int | None = None,
) -> Models:
    """Return the models of a run by version."""
    found: Models = {}

    def keep(version: int, arrays: ArrayRecord) -> None:
        found[version] = {name: x.numpy().copy() for name, x in arrays.items()}
        if version == fails_at:
            raise _StopHere

    with grid.running(is_ours=True), suppress(_StopHere):
        strategy.start(grid, initial, n, evaluate_fn=keep)
    return found


def _compare(whole: Models, other: Models, when: str) -> None:
    for version, model in whole.items():
        for name, array in model.items():
            if not np.array_equal(array, other[version][name]):
                raise ConfigError(
                    f"{when}, version {version} has another {name!r}: expected the same to the "
                    "last bit, from what `saved` names and `begin` prepares"
                )
