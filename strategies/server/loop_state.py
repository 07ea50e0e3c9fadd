"""What a checkpoint holds of a run, and how a run goes on from it.

Everything that decides what happens next is here: the model and its versions in flight, the
buffer, jobs, what is known of nodes, the state of every part, and the random stream. So a
simulation goes on as if it had never stopped. On real devices the jobs that were out are lost with
the run that sent them; their devices are free again, nothing of them is counted twice, and the
versions that they were sent are left out.
"""

from typing import TYPE_CHECKING

from flwr.app import MetricRecord

from fedstale.errors import ResumeError
from fedstale.strategies.state import State

if TYPE_CHECKING:
    from fedstale.strategies.server.loop import EventLoop

_INSTANTS = ("opened_at", "changed_at", "deadline")
_BOOKS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def state_of(loop: "EventLoop") -> State:
    """Return the state of a run between two of its turns."""
    result = loop.strategy.result
    return loop.state_dict() | {
        "now": loop.clock.now(),
        "parts": _parts(loop),
        "versions": loop.versions.state_dict(only_current=not loop.checkpointer.jobs_survive),
        "jobs": loop.jobs.state_dict(),
        "history": loop.history.state_dict(),
        "reputation": loop.reputation.state_dict(),
        "result": {
            book: {version: dict(metrics) for version, metrics in getattr(result, book).items()}
            for book in _BOOKS
        },
        "asked_at": loop.asked_at,
        "random": loop.rng.bit_generator.state,
        **{name: getattr(loop, name) for name in _INSTANTS},
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
    for name, kind in _parts(loop).items():
        if state["parts"][name] != kind:
            raise ResumeError(
                f"the checkpoint was written with {name} {state['parts'][name]}, and this run has "
                f"{kind}: resume with the app and settings that wrote it"
            )
    loop.versions.load_state_dict(state["versions"])
    loop.load_state_dict(state)
    shift_s = loop.clock.now() - state["now"]
    loop.jobs.load_state_dict(state["jobs"], shift_s)
    loop.history.load_state_dict(state["history"], shift_s)
    loop.reputation.load_state_dict(state["reputation"], shift_s)
    for name in _INSTANTS:
        setattr(loop, name, state[name] + shift_s)
    loop.progress.started_at += shift_s
    loop.asked_at = {node: at + shift_s for node, at in state["asked_at"].items()}
    loop.rng.bit_generator.state = state["random"]
    result = loop.strategy.result
    for book in _BOOKS:
        records = {v: MetricRecord(metrics) for v, metrics in state["result"][book].items()}
        getattr(result, book).update(records)
    result.arrays = loop.dispatcher.record()
    if not jobs_survive:
        loop.abandon_jobs()


def _parts(loop: "EventLoop") -> dict[str, str]:
    """Return which kinds of parts a run has."""
    parts = {
        "selector": loop.selector,
        "weighting": loop.buffer.weighting,
        "optimizer": loop.buffer.optimizer,
    }
    return {name: type(part).__name__ for name, part in parts.items()}
