"""What a checkpoint holds of a run, and how a run goes on from it.

Everything that decides what happens next is here: the model and its versions in flight, the
buffer, jobs, what is known of nodes, the state of every part, and the random stream. So a
simulation goes on as if it had never stopped. On real devices the jobs that were out are lost with
the run that sent them; their devices are free again, nothing of them is counted twice, and the
versions that they were sent are left out.
"""

from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord

from fedstale.errors import ResumeError
from fedstale.strategies.selection.base import Selector
from fedstale.strategies.server.runtime import State
from fedstale.strategies.server_optimizer import ServerOptimizer
from fedstale.strategies.weighting.base import Weighting

if TYPE_CHECKING:
    from fedstale.strategies.server.loop import EventLoop

_NUMBERS = ("failures", "most_out", "may_send", "short")
_INSTANTS = ("opened_at", "changed_at", "deadline")
_BOOKS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def state_of(loop: "EventLoop") -> State:
    """Return the state of a run between two of its turns."""
    progress, result = loop.progress, loop.strategy.result
    return {
        "now": loop.clock.now(),
        "parts": {name: _kind(part) for name, part in _parts(loop).items()},
        **{name: part.state_dict() for name, part in _parts(loop).items()},
        "versions": loop.versions.state_dict(only_current=not loop.checkpointer.jobs_survive),
        "jobs": loop.jobs.state_dict(),
        "history": loop.history.state_dict(),
        "buffer": loop.buffer.state_dict(),
        "reputation": loop.reputation.state_dict(),
        "evaluations": loop.evaluations.state_dict(),
        "progress": {
            "started_at": progress.started_at,
            "version": progress.version,
            "sent_bytes": progress.sent_bytes,
            "received_bytes": progress.received_bytes,
            "metrics": dict(progress.metrics),
        },
        "result": {
            book: {str(v): dict(metrics) for v, metrics in getattr(result, book).items()}
            for book in _BOOKS
        },
        "durations_s": list(loop.durations_s),
        "asked_at": {str(node): at for node, at in loop.asked_at.items()},
        "random": loop.rng.bit_generator.state,
        **{name: getattr(loop, name) for name in (*_NUMBERS, *_INSTANTS)},
    }


def continue_from(loop: "EventLoop", state: State, *, jobs_survive: bool) -> None:
    """Let a new run go on from the state of an earlier one.

    Args:
        loop: of the new run, which has sent nothing yet.
        state: what `state_of` returned.
        jobs_survive: whether the jobs that were out can still be answered.

    Raises:
        ResumeError: the state belongs to another model or to other parts.
    """
    for name, part in _parts(loop).items():
        kind = state["parts"][name]
        if kind != _kind(part):
            raise ResumeError(
                f"the checkpoint was written with {name} {kind}, and this run has {_kind(part)}: "
                "resume with the app and settings that wrote it"
            )
    loop.versions.load_state_dict(state["versions"])
    for name, part in _parts(loop).items():
        part.load_state_dict(state[name])
    shift_s = loop.clock.now() - state["now"]
    loop.jobs.load_state_dict(state["jobs"], shift_s)
    loop.history.load_state_dict(state["history"], shift_s)
    loop.reputation.load_state_dict(state["reputation"], shift_s)
    loop.evaluations.load_state_dict(state["evaluations"])
    for name in _NUMBERS:
        setattr(loop, name, state[name])
    for name in _INSTANTS:
        setattr(loop, name, state[name] + shift_s)
    _restore_progress(loop, state, shift_s)
    loop.durations_s.extend(state["durations_s"])
    loop.asked_at = {int(node): at + shift_s for node, at in state["asked_at"].items()}
    loop.rng.bit_generator.state = state["random"]
    loop.buffer.load_state_dict(state["buffer"])
    if not jobs_survive:
        loop.abandon_jobs()


def _restore_progress(loop: "EventLoop", state: State, shift_s: float) -> None:
    saved: dict[str, Any] = state["progress"]
    loop.progress.started_at = saved["started_at"] + shift_s
    for name in ("version", "sent_bytes", "received_bytes"):
        setattr(loop.progress, name, saved[name])
    loop.progress.metrics.update(saved["metrics"])
    result = loop.strategy.result
    for book in _BOOKS:
        records = {int(v): MetricRecord(metrics) for v, metrics in state["result"][book].items()}
        getattr(result, book).update(records)
    result.arrays = loop.dispatcher.record()


def _parts(loop: "EventLoop") -> dict[str, Selector | Weighting | ServerOptimizer]:
    return {
        "selector": loop.selector,
        "weighting": loop.buffer.weighting,
        "optimizer": loop.buffer.optimizer,
    }


def _kind(part: object) -> str:
    return type(part).__name__
