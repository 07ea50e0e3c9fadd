"""How much of its local epochs a ClientApp does: the one line by which it reads the share.

`local_steps` tells the app, and notes what was told; the mod of fedstale around the app puts that
into the reply, so that the server knows which apps read their share.
"""

from contextvars import ContextVar, Token
from dataclasses import dataclass

from flwr.app import Message

from fedstale.strategies.stages import StepsDone, asked_share, steps_of


@dataclass(slots=True)
class Note:
    """What an app does of the message that it works on."""

    done: StepsDone | None = None
    """None where it was asked for no share, or does not read it."""


_NOTE: ContextVar[Note | None] = ContextVar("fedstale-work", default=None)


class noting:  # noqa: N801 - a context manager
    """Notes what an app does inside; mods around one another share one note.

    Args:
        done: what it has done before, where its training and its mods run apart.
    """

    # Around every message of a simulation: a generator would take three times as long.
    __slots__ = ("_done", "_token")
    _token: Token[Note | None]

    def __init__(self, done: StepsDone | None = None) -> None:
        self._done = done

    def __enter__(self) -> Note:
        """Return the note."""
        note = _NOTE.get() or Note()
        note.done = self._done or note.done
        self._token = _NOTE.set(note)
        return note

    def __exit__(self, *problem: object) -> None:
        """End it."""
        _NOTE.reset(self._token)


def noted() -> StepsDone | None:
    """Return the steps that the app has noted for the current message; None if it noted none."""
    note = _NOTE.get()
    return None if note is None else note.done


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
    note = _NOTE.get()
    if note is not None and share is not None and steps:
        note.done = StepsDone(steps, whole)
    return steps
