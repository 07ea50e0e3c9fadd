"""A ClientApp that is paced: it trains and replies at given instants, on whatever machine it runs.

The instants come with the message: when the device has received it, and when its reply has left.
What the machine and Flower need themselves passes within these times and adds to them only where
it takes longer. A message without instants is answered at once.
"""

import math
import time
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedstale.errors import ProtocolError

REALTIME_RECORD = "fedstale.replay"
"""Name of the ConfigRecord with the instants in messages, and with the real ones in replies.

All are in s since 1970, UTC. In a message, `train_at` is when its last byte has arrived, so that
training may begin, and `reply_at` when the last byte of the reply has been sent.
"""


class RealtimeApp(ClientApp):
    """Another ClientApp, which is paced by the records of its messages."""

    def __init__(
        self,
        app: ClientApp,
        *,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wrap an app.

        Args:
            app: what does the work.
            now: returns seconds since 1970, UTC.
            sleep: waits some seconds.
        """
        super().__init__()
        self._app, self._now, self._sleep = app, now, sleep

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message at its time.

        Raises:
            ProtocolError: an instant is missing or is no finite number.
        """
        record = message.content.config_records.get(REALTIME_RECORD)
        if record is None:
            return self._app(message, context)
        taken_at = self._now()
        instants = [record.get(name) for name in ("train_at", "reply_at")]
        train_at, reply_at = (i if isinstance(i, int | float) else math.nan for i in instants)
        if not (math.isfinite(train_at) and math.isfinite(reply_at)):
            raise ProtocolError(
                f"{REALTIME_RECORD}: train_at, reply_at = {instants}: expected seconds since 1970"
            )
        # The app must get what it would get without pacing.
        del message.content[REALTIME_RECORD]
        self._wait(train_at)
        began_at = self._now()
        reply = self._app(message, context)
        trained_at = self._now()
        self._wait(reply_at)
        if not reply.has_error():
            reply.content[REALTIME_RECORD] = ConfigRecord(
                {
                    "taken_at": taken_at,
                    "began_at": began_at,
                    "trained_at": trained_at,
                    "left_at": self._now(),
                }
            )
        return reply

    def _wait(self, until: float) -> None:
        while (left := until - self._now()) > 0:
            self._sleep(min(left, 3600.0))
