"""How a run begins, what it keeps, and how it goes on from that.

A simulation goes on as if it had never stopped. On real devices the jobs that were out are lost
with the run that sent them: their devices are free again, nothing of them is counted twice, and the
versions that they were sent are left out of the state.
"""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flwr.app import MetricRecord

from fedstale.errors import ResumeError
from fedstale.strategies.server.runtime import ResumedClock
from fedstale.strategies.stages import StageRun
from fedstale.strategies.types import PURPOSES, End, State

if TYPE_CHECKING:
    from fedstale.strategies.server.loop import EventLoop

logger = logging.getLogger(__name__)

# The books of a result, in a checkpoint.
_BOOKS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")

# Settings of a process that may be others when a run goes on.
_OF_PROCESS = ("checkpoints", "resume", "stages", "recheck_s", "until")


def begin_stages(loop: "EventLoop", state: Mapping[str, State] | None = None) -> None:
    """Begin the stages of a run, or restore the states that they had."""
    earlier, loop.runtime.stages = loop.runtime.stages, loop.stages
    loop.runtime.summary = {}
    before, strategy = state or {}, loop.strategy
    for name in before.keys() - {stage.name for stage in loop.stages}:
        logger.warning("the run goes on without the stage %s that it had", name)
    if not loop.stages:
        return
    settings = {name: text for name, text in _settings(loop).items() if name != "selector"}
    checkpointer = loop.runtime.checkpointer
    run = StageRun(
        seed=strategy.seed,
        now=loop.clock.now,
        history=loop.history,
        arrays_key=strategy.arrayrecord_key,
        config_key=strategy.configrecord_key,
        bytes_in=loop.versions.bytes_in,
        model_in=lambda form: loop.versions.sent(loop.versions.version, form),
        about={
            "strategy": type(strategy).__name__,
            "settings": settings,
            "selector": loop.selector.described(),
        },
        folder=loop.runtime.folder,
        may_resume=strategy.resume is not None,
        repeats=checkpointer is not None and checkpointer.jobs_survive,
        is_resumed=state is not None,
        earlier=earlier,
        on_pick=loop.dispatcher.on_pick,
        on_end=loop.on_end,
        hint=loop.runtime.hint,
        summary=loop.runtime.summary,
    )
    for stage in loop.stages:
        stage.begin(run, before.get(stage.name))


def state_of(loop: "EventLoop") -> State:
    """Return everything that decides what happens next, between two turns."""
    result = loop.strategy.result
    return {
        "now": loop.clock.now(),
        "parts": _kinds(loop),
        "settings": _settings(loop),
        "versions": loop.versions.state_dict(only_current=not loop.checkpointer.jobs_survive),
        "result": {
            book: {version: dict(metrics) for version, metrics in getattr(result, book).items()}
            for book in _BOOKS
        },
        "random": loop.rng.bit_generator.state,
        "stages": {stage.name: stage.state_dict() for stage in loop.stages},
    }


def continue_from(loop: "EventLoop", state: State, *, jobs_survive: bool) -> None:
    """Go on from the state of an earlier run, before anything is sent.

    Args:
        loop: that goes on.
        state: of a checkpoint: what `EventLoop.state_dict` returned.
        jobs_survive: whether the jobs that were out can still be answered.

    Raises:
        ResumeError: the state belongs to another model or to other parts.
    """
    _check(loop, state)
    loop.versions.load_state_dict(state["versions"])
    loop.load_state_dict(state)
    loop.clock = ResumedClock(loop.clock, state["now"])
    loop.rng.bit_generator.state = state["random"]
    begin_stages(loop, state["stages"])
    result = loop.strategy.result
    for book in _BOOKS:
        records = {v: MetricRecord(metrics) for v, metrics in state["result"][book].items()}
        getattr(result, book).update(records)
    result.arrays = loop.dispatcher.record()
    if jobs_survive:
        return
    for purpose in PURPOSES:
        for job in loop.jobs.open_jobs(purpose):
            loop.end(job, End("cancelled"))
    for message_id in list(loop.jobs.awaited):
        loop.jobs.forget(message_id)


def _check(loop: "EventLoop", state: State) -> None:
    """Check that a checkpoint belongs to a run, and log which of its settings are others."""
    for name, kind in _kinds(loop).items():
        if (had := state["parts"][name]) != kind:
            raise ResumeError(
                f"the checkpoint was written with {name} {had}, and this run has {kind}: "
                "resume with the app and settings that wrote it"
            )
    now, before = _settings(loop), state["settings"]
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            logger.warning(
                "the checkpoint was written with %s = %s, and this run goes on with %s",
                *(name, before.get(name, "its default"), now.get(name, "its default")),
            )


def _kinds(loop: "EventLoop") -> dict[str, str]:
    """Return the classes of a run's parts, its seed and its fixed stages, which stay."""
    parts = {
        "strategy": loop.strategy,
        "selector": loop.selector,
        "pace": loop.pace,
        "weighting": loop.buffer.weighting,
        "optimizer": loop.buffer.optimizer,
    }
    kinds = {k: "None" if part is None else type(part).__name__ for k, part in parts.items()}
    fixed = [stage for stage in loop.strategy.stages if "same settings" in stage.requires]
    return kinds | {"seed": str(loop.strategy.seed), "stages": repr(fixed)}


def _settings(loop: "EventLoop") -> dict[str, str]:
    """Return the strategy's other settings, without places and without addresses in memory."""
    texts = {k: v for k, v in loop.strategy.settings().items() if k not in _OF_PROCESS}
    stages = [stage for stage in loop.strategy.stages if "any settings" not in stage.requires]
    texts |= {"stages": repr(stages)} if stages else {}
    return {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in texts.items()}
