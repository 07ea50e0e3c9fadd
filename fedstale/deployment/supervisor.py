"""A run on real devices that ends with what it was asked for, whatever is killed on the way.

Flower gives a run up when its ServerApp dies, and starts none in its place. This process does: it
waits until the run has ended, and if that was no completion it starts a new run, which goes on from
the checkpoints of the last. It holds no state. When it is killed itself the run goes on, and who
starts it again finds that run by its app and its settings.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from fedstale.config import read_toml
from fedstale.deployment import commands
from fedstale.deployment.control import Control, operators_side
from fedstale.deployment.processes import ProcessGroup
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import command_line

_POLL_S = 2.0
_WAIT_S = 5.0
_QUICK_S = 60.0
_QUICK_RUNS = 4
_STARTED = re.compile(r"started run (\d+)")
_FLWR = "flwr"
_ENDED, _COMPLETED, _STOPPED = "finished", "completed", "stopped"
"""Status of a run, as Flower shows it, and how it ended."""


class Supervisor:
    """Runs an app until it completes."""

    def __init__(
        self,
        app: Path,
        link: str,
        run_config: str,
        checkpoints: str,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """Find the app and the SuperLink; start nothing.

        Args:
            app: folder of a Flower app that reads `checkpoints` and `resume`, as the built-in ones.
            link: name of a SuperLink in Flower's config.toml.
            run_config: overrides, as flwr run takes them.
            checkpoints: folder where ServerApps run, in which only they may write.
            say: is told each step, and each line of a run's log.

        Raises:
            ConfigError: there is no such app or SuperLink, or the folder's name cannot be.
        """
        if "'" in checkpoints or not Path(checkpoints).is_absolute():
            raise ConfigError(
                f"checkpoints = {checkpoints!r}: expected an absolute path without quotes"
            )
        self._control = Control(*operators_side(link))
        self._app, self._link, self._say = app, link, say
        about = read_toml(app / "pyproject.toml")
        self._fab_id = f"{about['tool']['flwr']['app']['publisher']}/{about['project']['name']}"
        self._config = f"{run_config} checkpoints='{checkpoints}' resume='{checkpoints}'".strip()

    def run(self) -> tuple[int, str]:
        """Start runs until one completes, or an operator stops one.

        Returns:
            The number of that run, and "completed" or "stopped".

        Raises:
            FedstaleError: several in a row failed at once; the text says why the last did.
        """
        quick = 0
        run = self._unfinished()
        while True:
            started = time.monotonic()
            if run is not None:
                self._say(f"following run {run.run_id}, which goes on")
            run_id = self._start() if run is None else run.run_id
            status = "failed to start", "see above"
            if run_id is not None:
                ended = self._ended(run_id).status
                status = ended.sub_status, ended.details
                if ended.sub_status in {_COMPLETED, _STOPPED}:
                    self._say(f"run {run_id} {ended.sub_status}")
                    return run_id, str(ended.sub_status)
            quick = quick + 1 if time.monotonic() - started < _QUICK_S else 0
            about = f"run {run_id} {': '.join(filter(None, status))}"
            if quick == _QUICK_RUNS:
                raise FedstaleError(f"{about}; {quick} runs in a row ended at once")
            self._say(f"{about}; a new run goes on from its checkpoints")
            time.sleep(_WAIT_S * 2**quick)
            run = self._unfinished()

    def _start(self) -> int | None:
        """Start a run and show its log to the end; return its number, or None if it has none."""
        environment = commands.environment(command_line.flower_home())
        command = commands.found(commands.run(self._app, self._link, self._config), environment)
        run_id = None
        with (
            ProcessGroup() as processes,
            processes.output_of(_FLWR, command, environment=environment) as output,
        ):
            for line in output:
                found = _STARTED.search(line)
                run_id = int(found[1]) if found and run_id is None else run_id
                self._say(line)
        return run_id

    def _unfinished(self) -> Any:  # noqa: ANN401 - Flower's Run
        """Return the run with this app and these settings that goes on; None if there is none."""
        settings = command_line.parsed_config([self._config])
        for run in self._runs().values():
            is_same = (run.fab_id, run.override_config) == (self._fab_id, settings)
            if is_same and run.status.status != _ENDED:
                return run
        return None

    def _ended(self, run_id: int) -> Any:  # noqa: ANN401 - Flower's Run
        """Wait until a run has ended; the SuperLink may go away and come back meanwhile."""
        while (run := self._runs()[run_id]).status.status != _ENDED:
            time.sleep(_POLL_S)
        return run

    def _runs(self) -> dict[int, Any]:
        """Return all runs, as soon as the SuperLink answers."""
        is_silent = False
        while True:
            try:
                return self._control.details()
            except httpx.HTTPError as problem:
                if not is_silent:
                    self._say(f"the SuperLink does not answer, and is asked again: {problem}")
                is_silent = True
                time.sleep(_POLL_S)
