"""The server's side of less work: which share each node is asked for, and which apps read it."""

import logging

from flwr.app import Message

from fedstale.strategies.server.jobs import SentJob
from fedstale.strategies.types import Forecast
from fedstale.strategies.work import WORK, Done, Work

logger = logging.getLogger(__name__)


class WorkNodes:
    """What the nodes of a run are asked to do; whole jobs where only their steps are wanted."""

    def __init__(self, work: Work | None) -> None:
        """Ask for shares, or for whole jobs if there is no such setting."""
        self._work, self._warned = work, False

    def share_of(self, forecast: Forecast, upload: float) -> float:
        """Return the share of a node's next job; arguments as in `Work.share_of`."""
        return 1.0 if self._work is None else self._work.share_of(forecast, upload)

    def heard(self, job: SentJob, reply: Message) -> None:
        """Take note of a reply to a training; warn once of an app that did not read its share."""
        is_less = job.share is not None and job.share < 1.0
        if self._warned or not is_less or Done.of(reply.content) is not None:
            return
        self._warned = True
        logger.warning(
            "node %d was asked for a share of %g of its local epochs, and its reply says nothing "
            "of it under %s: its ClientApp trains in full; call fedstale.client.local_steps there, "
            "and have a mod of fedstale, such as PackMod",
            *(job.node_id, job.share, WORK),
        )
