"""A share of local epochs: the one line by which a ClientApp reads it.

`local_steps` tells the app, and records it; the mod of fedstale around the app puts the record into
the reply, so that the server knows which apps read their share.
"""

from contextvars import ContextVar, Token

from flwr.app import Message

from fedstale.strategies.stages import StepsDone, asked_share, steps_of


class StepRecorder:
    """Records the steps that an app does inside; recorders around one another share one record.

    Args:
        done: steps done before, where an app's training and its mods run apart.
    """

    # Around every message of a simulation: a generator would take three times as long.
    __slots__ = ("_token", "done")
    _token: "Token[StepRecorder | None]"

    def __init__(self, done: StepsDone | None = None) -> None:
        self.done = done

    def __enter__(self) -> "StepRecorder":
        """Return the outermost recorder; its `done` is None where the app reads no share."""
        outermost = _RECORDER.get() or self
        outermost.done = self.done or outermost.done
        self._token = _RECORDER.set(outermost)
        return outermost

    def __exit__(self, *problem: object) -> None:
        """Record no more."""
        _RECORDER.reset(self._token)


_RECORDER: ContextVar[StepRecorder | None] = ContextVar("fedstale-work", default=None)


def recorded_steps() -> StepsDone | None:
    """Return the steps that the app has done for the current message; None if it read no share."""
    recorder = _RECORDER.get()
    return None if recorder is None else recorder.done


def local_steps(message: Message, epochs: int, per_epoch: int) -> int:
    """Return how many local steps to take: all of some epochs, or the share that is asked for.

    The server's `work=` says the share; without it these are all. With any mod of fedstale around
    the app (`PackMod`, `CompressionMod` or `ForecastMod`) the reply states what was done.

    Args:
        message: of training.
        epochs: local epochs of a whole job, >= 0.
        per_epoch: steps, that is, batches, of one epoch, >= 0.

    Returns:
        From 1 to epochs x per_epoch, and 0 only where that is 0; a share is rounded down.

    Raises:
        ProtocolError: the message asks for something that is no share.

    Example:
        A loop over the batches of a loader, which may end within an epoch:

            steps = local_steps(message, epochs=5, per_epoch=len(loader))
            for batch in islice(chain.from_iterable(repeat(loader)), steps):
                ...
    """
    whole, share = epochs * per_epoch, asked_share(message.content)
    steps = whole if share is None else steps_of(share, whole)
    recorder = _RECORDER.get()
    if recorder is not None and share is not None and steps:
        recorder.done = StepsDone(steps, whole)
    return steps
