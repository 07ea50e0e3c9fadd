"""The executor that needs nothing: clients run one after the other in this process."""

from collections.abc import Sequence

from flwr.clientapp import ClientApp

from fedstale.simulation.executors.base import Answer, Call, Executor, answer, own_random_streams
from fedstale.simulation.quick_arrays import quick_arrays


class InlineExecutor(Executor):
    """Runs clients one after the other in this process; nothing is serialised."""

    def __init__(self, client_app: ClientApp) -> None:
        self._client_app = client_app

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls."""
        with own_random_streams(), quick_arrays():
            return [answer(self._client_app, call) for call in calls]

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return "inline, in this process"
