"""One simulation from its settings to its folder."""

import logging
import random
import shutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from fedstale.compat import Replacement, importing, server_fn_on, stock_strategies_reporting
from fedstale.config import Costs, SimulationConfig
from fedstale.errors import ConfigError, FedstaleError, ResumeError, RunEnded, first_line, quoted
from fedstale.flower import features, legacy
from fedstale.interrupts import CTRL_C
from fedstale.reports import Run
from fedstale.runs import RunFolder, status_of
from fedstale.simulation.costs import check_costs
from fedstale.simulation.executors.base import imported_torch, seed_streams, seeded_entropy
from fedstale.simulation.executors.choice import executor_for
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.metrics import (
    MessageRounds,
    NoneGood,
    RunMetrics,
    end_of_app,
    ending,
    write_run,
)
from fedstale.simulation.nodes import (
    enrolled,
    missing_partitions,
    node_configs,
    online,
    require_end,
    too_short,
    unknown_share,
    without_rate,
)
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.server import (
    CLIENT_ERROR,
    REJECTED,
    REPORTED,
    Callback,
    Checkpointer,
    Checkpoints,
    Versions,
    read_checkpoint,
)
from fedstale.strategies.stages import OlderClients
from fedstale.strategies.types import State
from fedstale.traces import TraceSet
from fedstale.until import Until

logger = logging.getLogger(__name__)

_SERVER_SEED = 2

_LARGEST_SHARE = 0.05
"""Of the wall time of a run that may be spent on checkpoints."""


def simulate(
    config: SimulationConfig,
    out: Path,
    *,
    traces: TraceSet,
    app: FlowerApp | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pause_at: float = np.inf,
    callbacks: Iterable[Callback] = (),
) -> Run:
    """Run an app on traces and write the run's folder.

    Args:
        config: the settings.
        out: the run's folder, to be made.
        traces: the devices that `config.traces` names.
        app: an app of objects; None finds the one that `config.app` names.
        overwrite: whether an earlier run in the folder may be removed.
        resume: whether to go on with the run in the folder, which has the same settings or an
            earlier limit, from its last checkpoint; without one it begins anew.
        pause_at: virtual instant in s at which to interrupt the run, to go on later.
        callbacks: told what happens in the run, besides what its folder needs.

    Returns:
        What happened; a run that fails, is stuck or is interrupted keeps what was done.

    Raises:
        FedstaleError: the settings, the app or the traces are not usable; nothing is written.
    """
    features.require("simulation")
    if resume:
        features.require("simulations on disk")
    app = app or FlowerApp.find(config.app)
    config = app.resolved(config)
    costs = Costs.from_table(config.costs)
    known, traces = traces.device_ids, enrolled(traces, config)
    nodes = node_configs(config, known, traces.device_ids)
    still = without_rate(traces, app, costs)
    metrics = RunMetrics(Until.parse(config.until))
    require_end(metrics.until, traces, costs)
    with ExitStack() as stack, app.importable(), seeded_entropy():
        # Before anything is built that would refuse other settings in other words.
        folder = stack.enter_context(RunFolder.resume(out, config)) if resume else None
        state = _last_checkpoint(folder) if folder else None
        run_config = dict(config.run_config)
        with importing():
            server, client, work = app.load_server(), app.load_client(), app.load_work()
        if work is None:
            check_costs(client, costs)
        replacement = _replacement(app, config, server)
        limit_s, where = config.client_limit_s, (config.executor, config.workers, config.gpus)
        # What trains clients elsewhere needs no functions of this process.
        clients = replace(app, strategy=None, work=None)
        with executor_for(clients, client, *where, limit_s=limit_s) as executor:
            if limit_s is not None and not executor.is_remote:
                raise ConfigError(
                    f"client_limit_s = {limit_s:g}: a client of this process can be ended only "
                    "with it; use executor = 'processes'"
                )
            grid = TraceGrid(
                traces,
                executor,
                costs=costs,
                seed=config.seed,
                run_config=run_config,
                on_interrupt=config.on_interrupt,
                until_s=min(metrics.until.time_s, pause_at),
                work=work,
                nodes=nodes,
                results=() if app.is_built_in else (Path.cwd(), app.directory),
            )
            if features.has("older API") and legacy.is_older_client(client):
                grid.runtime.own_stages = (OlderClients(),)
            messages = MessageRounds()
            for callback in (
                *(metrics, messages, NoneGood(traces.n_devices), *replacement.callbacks),
                *callbacks,
            ):
                grid.runtime.add(callback)
            folder = folder or stack.enter_context(RunFolder.create(out, overwrite=overwrite))
            folder.write_config(config)
            stack.enter_context(folder.logging(appends=resume))
            grid.runtime.folder = folder.path
            if still:
                grid.runtime.hint(still)
            grid.runtime.checkpointer = SimulationCheckpointer(
                folder.checkpoints,
                grid,
                metrics,
                every=config.checkpoint_every if features.has("simulations on disk") else 0,
                state=state,
            )
            del state
            seed_server(config.seed)
            started = perf_counter()
            # Of what was measured before a checkpoint nobody knows the wall time.
            context = Context(1, 1, {}, RecordDict(), run_config)
            status, reason = _outcome(
                lambda: serve(grid, app, server, context, replacement), app.directory
            )
            if status == "stopped" and pause_at <= grid.now() < metrics.until.time_s:
                status, reason = "interrupted", f"paused at {pause_at:,.0f} s of virtual time"
            wall_s = perf_counter() - started
            messages.finish(grid.runtime)
            grid.runtime.hints += [
                app.own_seed(config),
                replacement.unheeded(str(run_config["strategy"])) if app.says_strategy else "",
                too_short(traces, grid.now(), costs) if status in ("finished", "stopped") else "",
            ]
            facts = {
                "app": app.name,
                "devices": traces.n_devices,
                "seed": config.seed,
                "epoch": traces.epoch,
                "strategy": "; ".join(replacement.ran),
                "in_place_of": ", ".join(replacement.replaced),
                "executor": executor.description,
                "wall_s": round(wall_s, 3),
            }
            return _written(folder, grid, traces, metrics, (status, reason), facts)


def _written(  # noqa: PLR0917 - what a run has come to
    folder: RunFolder,
    grid: TraceGrid,
    traces: TraceSet,
    metrics: RunMetrics,
    how: tuple[str, str],
    facts: Mapping[str, Any],
) -> Run:
    """Write what a run has come to, and tell those who watch how it ended: status and reason."""
    status, reason = how
    if status == "finished":
        reason = end_of_app(grid.runtime)
    grid.runtime.ended(status, reason)
    try:
        folder.write_events(grid.event_tables())
        folder.write_online(online(traces, folder, grid.now()))
        if missing := missing_partitions(folder, grid.nodes):
            grid.runtime.hint(missing)
        if status == "finished":
            problem = _verdict(folder.read_events(["status", "reason"]))
            status, reason = ("failed", problem) if problem else (status, reason)
        ended: dict[str, Any] = {"status": status, "reason": reason}
        if unknown := unknown_share(traces.channel("availability"), grid.now()):
            ended["unknown_share"] = round(unknown, 4)
        return write_run(folder, grid.runtime, metrics, {**ended, **facts})
    except FedstaleError as problem:
        if status_of(folder.path):
            raise
        raise FedstaleError(
            f"{problem}, and fedstale simulate --resume {folder.path} goes on from the last "
            "checkpoint, or begins anew"
        ) from None
    finally:
        if status_of(folder.path) and status not in ("interrupted", "stopped"):
            shutil.rmtree(folder.checkpoints, ignore_errors=True)


class SimulationCheckpointer(Checkpointer):
    """Keeps a simulation on disk, so that one that was killed can go on.

    A checkpoint holds the strategy, the grid with every job, what was measured, and the random
    streams of the server. Going on from it gives the same events and metrics, byte for byte, as a
    run that was never stopped. It costs time in proportion to what has happened so far; so
    checkpoints are written at every version, or as seldom as keeps their cost small.
    """

    jobs_survive = True

    def __init__(
        self,
        folder: Path,
        grid: TraceGrid,
        metrics: RunMetrics,
        *,
        every: int,
        state: State | None,
    ) -> None:
        """Keep a run.

        Args:
            folder: of the checkpoints.
            grid: of the run.
            metrics: of the run.
            every: versions from one checkpoint to the next; 0 writes none.
            state: the checkpoint to go on from, if there is one.
        """
        self._grid, self._metrics = grid, metrics
        # The folder of the run is held, and only while it goes on.
        self._checkpoints = Checkpoints(folder, is_held=True) if every else Checkpointer()
        self._every, self._state = every, state
        self._due_at, self._n_starts = 0.0, 0

    def restored(self) -> State | None:
        """Restore the run from its checkpoint, and return the strategy's state."""
        self._n_starts += 1
        state, self._state = self._state, None
        if state is None:
            return None
        strategy: State = state["strategy"]
        self._grid.load_state_dict(state["grid"])
        # What was measured before the strategy started was measured before the crash too.
        self._metrics.load_state_dict(state["metrics"])
        self._grid.runtime.trained = self._metrics.rounds
        self._grid.runtime.limits = self._metrics.limits
        self._metrics.arrays = Versions.model_in(strategy["versions"])
        _set_random_streams(state["random"])
        return strategy

    def is_due(self, version: int) -> bool:
        """Return whether it is time for a checkpoint.

        An app that starts a second strategy needs what the first has made of the model, which is on
        Python's stack: it goes on from the last checkpoint of the first.
        """
        if self._n_starts > 1:
            return False
        return bool(self._every) and version % self._every == 0 and perf_counter() >= self._due_at

    def keep(self, version: int, state: Callable[[], State]) -> None:
        """Write a checkpoint."""
        started = perf_counter()
        self._checkpoints.keep(
            version,
            lambda: {
                "strategy": state(),
                "grid": self._grid.state_dict(),
                "metrics": self._metrics.state_dict(),
                "random": _random_streams(),
            },
        )
        now = perf_counter()
        self._due_at = now + (now - started) / _LARGEST_SHARE


def _replacement(app: FlowerApp, config: SimulationConfig, server: ServerApp) -> Replacement:
    """Make the replacement of the app's strategies.

    Raises:
        ConfigError: something is to, and the ServerApp has strategies of the older API.
    """
    named = app.strategy or config.strategy
    if named is not None and features.has("parts of a ServerApp") and legacy.is_older(server):
        raise ConfigError(
            f"strategy = {config.strategy!r}: the ServerApp is of Flower's older API (server_fn), "
            "whose strategies are of another kind; expected one that starts a strategy under "
            "@app.main()"
        )
    return Replacement(named, seed=config.seed)


def serve(
    grid: TraceGrid, app: FlowerApp, server: ServerApp, context: Context, replacement: Replacement
) -> None:
    """Run a ServerApp, with what other people's code needs if it is not fedstale's alone.

    Raises:
        ConfigError: its strategy was to be replaced, and it has started none.
    """
    modules = app.modules()
    with ExitStack() as stack:
        if not app.is_ours:
            stack.enter_context(stock_strategies_reporting(grid.runtime, replacement))
            stack.enter_context(server_fn_on(grid, *modules))
        stack.enter_context(grid.running(*modules, is_ours=app.is_ours))
        server(grid, context)
    replacement.check()


def _last_checkpoint(folder: RunFolder) -> State | None:
    """Read the last checkpoint of a run that goes on; None if it begins anew."""
    try:
        return read_checkpoint(folder.checkpoints)
    except ResumeError:
        logger.warning("there is no checkpoint of this run: it begins anew")
        return None


def _outcome(serve: Callable[[], None], directory: Path) -> tuple[str, str]:
    """Run the ServerApp and return how it ended, as a status and a reason."""
    try:
        serve()
    except (RunEnded, FedstaleError) as end:
        return ending(end)
    except KeyboardInterrupt as stop:
        return "interrupted", str(stop) or CTRL_C
    except SystemExit as end:
        if end.code not in (None, 0):
            return "failed", f"the ServerApp called sys.exit({end.code!r})"
    except Exception as problem:
        logger.info("the ServerApp failed", exc_info=True)
        return "failed", _sentence(problem, directory)
    return "finished", ""


def _verdict(events: pa.Table) -> str:
    """Return why a run failed whose ServerApp came to its end, or nothing if it did not."""
    statuses, reasons = events["status"], events["reason"]
    seen = set(pc.unique(statuses).to_pylist())
    if not seen or REPORTED in seen:
        return ""
    for status, what in ((CLIENT_ERROR, "client failed"), (REJECTED, "reply was rejected")):
        if status in seen:
            first = pc.index(statuses, status).as_py()
            return f"every {what}; the first: {first_line(reasons[first])}"
    return f"no job ever came back; the first: {reasons[0].as_py() or statuses[0].as_py()}"


def seed_server(seed: int) -> None:
    """Seed the global streams that stock strategies and apps draw from on the server."""
    state = np.random.SeedSequence(seed, spawn_key=(_SERVER_SEED,)).generate_state(1)[0]
    seed_streams(int(state))
    torch = imported_torch()
    if torch is not None:
        # Sums of floats depend on the number of threads, and small models are faster on one.
        torch.set_num_threads(1)


def _sentence(problem: Exception, directory: Path) -> str:
    """Return an app's exception as one line that says where in the app it was raised."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(directory)] or list(frames)
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    told = quoted(f"the ServerApp raised {type(problem).__name__}: {problem}")
    return f"{first_line(told)} ({where})"


def _random_streams() -> State:
    """Return the global streams that apps and stock functions draw from on the server."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: State = {
        "python": [version, np.array(words, dtype=np.uint64), gauss],
        "numpy": [name, keys, *rest],
    }
    torch = imported_torch()
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy()
    return state


def _set_random_streams(state: State) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys, *rest))  # noqa: NPY002
    torch = imported_torch()
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
