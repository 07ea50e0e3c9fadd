"""A whole deployment for the length of one run: start it, run an app, and leave nothing behind."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstale.deployment import commands
from fedstale.deployment.fleet import LINK, Fleet
from fedstale.deployment.processes import MARK, ProcessGroup, clean_up
from fedstale.errors import ConfigError, FedstaleError

_SETTLE_S = 20.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def fleet_up(
    folder: Path,
    *,
    nodes: int,
    overwrite: bool = False,
    limit_s: float = 120.0,
    executor_apart: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Fleet]:
    """Start a SuperLink and SuperNodes, and end them afterwards.

    Args:
        folder: a new one for certificates, keys, state and logs.
        nodes: number of SuperNodes.
        overwrite: whether an earlier fleet's folder may be replaced.
        limit_s: to wait for each process to answer.
        executor_apart: whether ServerApps outlive the SuperLink; see `Fleet`.
        say: is told each step.

    Raises:
        ConfigError: the folder holds something else.
        FedstaleError: something does not start.
    """
    _make_room(folder, overwrite=overwrite)
    ended = clean_up()
    if ended:
        say(f"ended {ended} processes that an earlier fleet had left")
    with ProcessGroup() as family:
        fleet = Fleet(
            folder,
            family,
            n_nodes=nodes,
            limit_s=limit_s,
            executor_apart=executor_apart,
            say=say,
        )
        try:
            fleet.start_superlink()
            for number in range(nodes):
                fleet.add_node(number)
            fleet.wait_online()
            yield fleet
        finally:
            fleet.close()


def run_app(
    fleet: Fleet, app: Path, *, run_config: str = "", show: Callable[[str], None] = print
) -> int:
    """Run an app on a fleet, as `flwr run APP up --stream` does.

    Args:
        fleet: with its nodes online.
        app: its folder.
        run_config: overrides, as flwr run takes them.
        show: is told each line of the log.

    Returns:
        The run's id.

    Raises:
        FedstaleError: the run did not complete; the text says why, if the log does.
    """
    before = set(fleet.control.runs())
    environment = {**fleet.operator_environment(), MARK: fleet.family.mark}
    command = commands.found(commands.run(app, LINK, run_config), environment)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(_COLOUR.sub("", line.rstrip("\n")))
                show(lines[-1])
        except BaseException:
            process.kill()
            raise
    started = sorted(set(fleet.control.runs()) - before)
    if not started:
        raise FedstaleError(f"flwr run started nothing: {_plain(lines)}")
    status, details = _ended(fleet, started[-1])
    if status != "finished:completed":
        raise FedstaleError(
            f"the run {status.removeprefix('finished:')}: {details or _plain(lines[-5:])}; logs "
            f"are in {fleet.folder}"
        )
    return started[-1]


def _ended(fleet: Fleet, run_id: int) -> tuple[str, str]:
    """Return how a run ended; the SuperLink knows a little after the last line of the log."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        status, details = fleet.control.runs()[run_id]
        if status.startswith("finished") or time.monotonic() > deadline:
            return status, details
        time.sleep(0.2)


def _plain(lines: list[str]) -> str:
    """Return the text of lines without frames."""
    words = " ".join(line.strip("│╭╮╰╯─ ") for line in lines)
    return re.sub(r"\s+", " ", words).strip()


def _make_room(folder: Path, *, overwrite: bool) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        ours = (folder / "superlink.log").is_file() and (folder / "ca.crt").is_file()
        if not (overwrite and ours):
            raise ConfigError(
                f"out = {str(folder)!r} is not empty: expected a new folder, or "
                + ("pass --overwrite" if ours else "another path")
            )
        shutil.rmtree(folder)
