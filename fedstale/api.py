"""The calls behind `import fedstale`: simulate, compare and read_run."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tomli_w
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from fedstale.comparison import (
    Comparison,
    Plan,
    Watch,
    analyse,
    check_free,
    check_target,
    finished,
    grouped,
    run_all,
    write,
)
from fedstale.config import (
    Costs,
    ExecutorKind,
    NodeTables,
    SimulationConfig,
    flat,
    instant_s,
    read_toml,
)
from fedstale.errors import ConfigError, nearest
from fedstale.flower import command_line, record_of
from fedstale.interrupts import end_on_signals, exit_code
from fedstale.live import ProgressNotes, RepeatedInterrupt, progress_line
from fedstale.reports import STRATEGY, Advice, Run, note_advice, report_at_end
from fedstale.runs import CONFIG, make_folder, new_folder
from fedstale.simulation import FlowerApp, WorkHook, changed
from fedstale.simulation import simulate as simulate_config
from fedstale.strategies import StaleStrategy, parse
from fedstale.strategies.server import Callback
from fedstale.traces import TraceSet
from fedstale.until import Until

LOG, RUNS, _ADVISED = "log.txt", "runs", "-advised"
_ENDLESS, _LINE_EVERY_S = 10**9, 0.5


def simulate(
    app: str | Path | ClientApp | tuple[ServerApp, ClientApp],
    *,
    traces: str | Path | TraceSet,
    strategy: Strategy | str | None = None,
    initial_arrays: ArrayRecord | Mapping[str, npt.ArrayLike] | None = None,
    evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    until: str | None = None,
    seed: int = 0,
    seed_key: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pause_at: str | None = None,
    devices: int | None = None,
    partitions: int | None = None,
    node_config: str | Path | NodeTables | None = None,
    run_config: Mapping[str, bool | int | float | str] | None = None,
    work: Mapping[str, float] | WorkHook | None = None,
    on_interrupt: Literal["abort", "pause"] = "abort",
    after_end: Literal["repeat", "stop"] = "repeat",
    executor: ExecutorKind = "auto",
    workers: int | None = None,
    gpus: float | None = None,
    checkpoint_every: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **costs: float | str | None,
) -> Run:
    """Run a Flower app on replayed devices.

    Clients run in this process unless `executor` or `workers` say otherwise. One that ends it, by
    `os._exit`, a segmentation fault or all of the memory, ends the caller too; `resume` goes on
    from the last checkpoint. With executor "processes" the run goes on, and the job has an error.

    Clients of an app in a directory move to processes of their own where that pays.

    Flower's log is in the run's folder, as log.txt, and stderr shows its warnings alone, unless the
    level of the logger "flwr" was set before.

    Args:
        app: directory of a Flower app, name of a built-in one, a ClientApp to run under a strategy,
            or a ServerApp and a ClientApp. A run of objects cannot be repeated from its
            config.toml, and its clients run in this process.
        traces: file of device traces, synthetic:N, synthetic:N@desktops or @sites, ideal:N, or the
            traces themselves.
        strategy: what runs a ClientApp, or takes the place of the strategy that a ServerApp starts:
            a text such as "FedBuff(20, 5)", or a strategy. A run under a strategy that is no text
            cannot be repeated from its config.toml.
        initial_arrays: the first model of a strategy: a record of Flower, or arrays by name.
        evaluate: central evaluation of a strategy, called with version and model.
        until: when to end: a virtual time (2d), rounds (100 rounds) or a metric (accuracy 0.9).
            An app with a ServerApp also ends by itself.
        seed: of everything that is random, of the app too: a key of its run config takes it, unless
            `run_config` sets another.
        seed_key: that key; None takes what the app's [tool.fedstale] says, or `seed` if the app has
            it, and an empty text none.
        out: folder of the run; None takes a temporary one, which goes with the returned object.
        overwrite: whether an earlier run in the folder may be removed.
        resume: whether to go on with the run in `out`: one that was interrupted, killed or paused,
            or one that stopped at its limit, to a later one of the same kind. All else that is
            passed is what it was.
        pause_at: virtual time, such as 20m, at which the run is interrupted, to go on later.
        devices: how many devices of the traces to enrol, drawn with the seed; None enrols all.
        partitions: partition ids of the devices count up to it and begin again, so that they share
            data; None gives each device one of its own.
        node_config: what devices have in their node config besides, by device id, such as
            {"device-3": {"ram": 4}}; or a TOML file of that.
        run_config: overrides of the app's run config; with objects, the whole of it.
        work: work units of a whole message by its type, or type and action, such as
            {"train.keys": 0}; or a function that returns them of a message, or None for what the
            rest says. A unit is a second of the median phone.
        on_interrupt: whether a device that goes offline loses its work, or goes on later.
        after_end: what follows when a trace is over.
        executor: what trains clients; auto measures.
        workers: processes that train clients; 1 for none but this.
        gpus: of each Ray actor.
        checkpoint_every: model versions from one checkpoint to the next; 0 writes none.
        callbacks: told what happens in the run; see `fedstale.strategies.Callback`.
        progress: whether a line on stderr shows how far the run is; None shows it on a terminal
            and in a notebook.
        **costs: what devices pay, as `fedstale.simulation.Costs` has it, such as
            work_per_example=0.5, epochs=1, examples=20, model_bytes=14_000_000; they come before
            what the app says.

    Returns:
        The run. One that failed, got stuck or was interrupted keeps what was done: see `status`
        and `reason`.

    Raises:
        FedstaleError: the settings, the app or the traces are not usable; nothing is written.
        SystemExit: SIGTERM, or SIGHUP, has interrupted the run, which keeps what was done.
    """
    pause_s = np.inf if pause_at is None else instant_s(pause_at, "pause_at")
    if (resume or pause_at is not None) and out is None:
        raise ConfigError("resume and pause_at: expected out, the folder of the run that goes on")
    declared = _declared(costs, work)
    own, hook = Costs.from_table(declared), work if callable(work) else None
    if not isinstance(app, ClientApp) and (initial_arrays, evaluate) != (None, None):
        raise ConfigError(
            "initial_arrays and evaluate: expected together with a ClientApp alone, because a "
            "ServerApp has its own; pass it options by run_config"
        )
    objects, name, named = None, str(app), strategy
    if isinstance(app, ClientApp):
        made = parse(strategy, seed=seed) if isinstance(strategy, str) else strategy
        server, name, named = (
            _server(made, initial_arrays, until, evaluate),
            type(made).__name__,
            None,
        )
        objects = FlowerApp(Path.cwd(), name, server, app, dict(run_config or {}), own, work=hook)
        objects = replace(objects, is_ours=_is_ours(made, evaluate, *callbacks))
    elif not isinstance(app, str | Path):
        name = "ServerApp"
        objects = FlowerApp(Path.cwd(), name, *app, dict(run_config or {}), own, work=hook)
    elif hook is not None or isinstance(strategy, Strategy):
        found = FlowerApp.find(app)
        objects = found if hook is None else replace(found, work=hook)
    if isinstance(named, Strategy):
        assert objects is not None
        objects, named = replace(objects, strategy=named), f"a {type(named).__name__}"
    config = SimulationConfig(
        app=name,
        traces="a TraceSet" if isinstance(traces, TraceSet) else str(traces),
        devices=devices,
        partitions=partitions,
        node_config=str(node_config) if isinstance(node_config, Path) else node_config,
        strategy=named,
        seed=seed,
        seed_key=seed_key,
        until=until,
        on_interrupt=on_interrupt,
        after_end=after_end,
        executor=executor,
        workers=workers,
        gpus=gpus,
        checkpoint_every=checkpoint_every,
        run_config=dict(run_config or {}),
        costs=declared,
    )
    if not isinstance(traces, TraceSet):
        traces = TraceSet.load(str(traces), seed=seed)
    with (
        end_on_signals(with_ctrl_c=False) as heard,
        ExitStack() as stack,
        progress_line(progress) as say,
        command_line.quiet_console(),
    ):
        if objects is None or not objects.is_ours:
            # Somebody else's code may miss the exception.
            callbacks = [*callbacks, RepeatedInterrupt(heard)]
        if say is not None:
            say("starting")
            notes = ProgressNotes(say, Until.parse(until), every_s=_LINE_EVERY_S)
            callbacks = [*callbacks, notes]
        run = simulate_config(
            config,
            result_folder(out, stack),
            app=objects,
            traces=traces,
            overwrite=overwrite,
            resume=resume,
            pause_at=pause_s,
            callbacks=callbacks,
        )
        weakref.finalize(run, stack.pop_all().close)
        if run.status == "interrupted" and heard():
            # Whoever stops a process waits for its end, and not for the rest of a script.
            raise SystemExit(exit_code(heard()))
    return run


def _is_ours(strategy: object, *others: object) -> bool:
    """Test whether a server runs fedstale's code alone, as far as its parts and theirs show."""
    todo, seen = [strategy, *others], set[int]()
    while todo:
        part = todo.pop()
        if isinstance(part, list | tuple | Mapping):
            todo += part.values() if isinstance(part, Mapping) else part
        elif id(part) not in seen and (callable(part) or hasattr(part, "__dict__")):
            seen.add(id(part))
            if str(getattr(part, "__module__", "")).partition(".")[0] not in {"fedstale", "flwr"}:
                return False
            if not isinstance(part, FunctionType | type):
                names = getattr(part, "__dict__", getattr(part, "__slots__", ()))
                todo += [getattr(part, name, None) for name in names]
    return isinstance(strategy, StaleStrategy)


def _declared(
    costs: Mapping[str, float | str | None], work: Mapping[str, float] | WorkHook | None
) -> dict[str, Any]:
    """Return the costs that are given, with the keys of [tool.fedstale].

    Raises:
        ConfigError: one is no cost, nor an option of `simulate`.
    """
    known = {f.name for f in fields(Costs)}
    for name in costs:
        if name not in known:
            options = sorted(known | set(signature(simulate).parameters) - {"costs"})
            raise ConfigError(f"simulate has no option {name!r}: expected {nearest(name, options)}")
    by_kind = {} if work is None or callable(work) else {"work": work}
    given = {key.replace("_", "-"): value for key, value in costs.items() if value is not None}
    return dict(flat({**given, **by_kind}))


def compare(
    source: str | Path | Mapping[str, Any] | Plan | Sequence[Run | str | Path],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    target: str | None = None,
    reference: str | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
    progress: bool | None = None,
    address: str | None = None,
) -> Comparison:
    """Compare variants of a simulation over seeds, each paired with a reference.

    Runs of a plan are processes of their own. Runs that are done are kept and interrupted ones go
    on, so the same call finishes the rest.

    Args:
        source: a plan, its TOML file or its table; or finished runs or their folders, which are
            grouped by the settings in which they differ; or lists of such by the name of a variant,
            since no setting tells strategies apart that were objects.
        out: folder of the runs and of comparison.html, .json, .csv and .md; None takes a temporary
            one, which goes with the returned object.
        workers: runs at a time; None takes one for each core, of the cluster if there is one.
        target: a metric and its value, such as "accuracy 0.9", to compare the times to it; replaces
            that of the plan.
        reference: variant to compare with; replaces that of the plan.
        overwrite: whether to run everything again, and to replace a comparison of other runs.
        watch: called with the share of each run that is over, by folder, whenever one has moved.
        progress: whether a line on stderr shows how many runs are over; None shows it on a terminal
            and in a notebook. With `watch` there is none.
        address: auto or HOST:PORT of a Ray cluster whose nodes run the plan; None of this machine.

    Raises:
        ConfigError: the plan cannot be, a folder holds another run or comparison, or runs cannot be
            compared.
        ProtocolError: a file of a run cannot be read.
        KeyboardInterrupt: it was asked to stop; the runs keep what they have done.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"workers = {workers}: expected a number of processes >= 1")
    with ExitStack() as stack:
        folder = result_folder(out, stack)
        text = ""
        variants = _variants(source)
        if variants is not None:
            check_target(target)
            if reference is not None and reference not in variants:
                raise ConfigError(f"reference = {reference!r}: expected one of {[*variants]}")
            found = analyse(variants, reference=reference or next(iter(variants)), target=target)
            if not overwrite:
                check_free(folder, (run.folder for one in found.variants for run in one.runs))
        else:
            assert isinstance(source, str | Path | Mapping | Plan)
            plan = _plan(source, {"target": target, "reference": reference})
            text = tomli_w.dumps(plan.table())
            runs = plan.runs(folder / RUNS)
            if not overwrite:
                check_free(folder, (run.folder for run in runs))
            make_folder(folder)
            with progress_line(progress if watch is None else False) as say:

                def look(shares: Mapping[Path, float]) -> None:
                    if say is not None:
                        say(f"{sum(shares.values()):.1f} of {len(shares)} runs are over")

                failed = run_all(
                    runs,
                    workers=workers,
                    log=folder / LOG,
                    overwrite=overwrite,
                    watch=watch or look,
                    address=address,
                )
            done = [run for run in runs if run.folder not in failed]
            found = analyse(
                {v: [finished(r.folder) for r in done if r.variant == v] for v in plan.variants},
                reference=plan.reference,
                target=plan.target,
                failures=[
                    (r.variant, r.config.seed, failed[r.folder]) for r in runs if r.folder in failed
                ],
            )
        make_folder(folder)
        write(found, folder, plan=text)
        weakref.finalize(found, stack.pop_all().close)
    return found


def read_run(folder: str | Path) -> Run:
    """Return the run in a folder.

    Raises:
        ConfigError: it is not the folder of a run that is over.
        ProtocolError: a file in it cannot be read.
    """
    return Run(folder)


def with_advice(run: Run, advice: Advice) -> Run:
    """Repeat a simulated run with what a piece of advice changes, in a folder beside its own.

    The `advised.json` there says what was promised and what came of it, and the report shows both.

    Args:
        run: of an app in a folder.
        advice: one of `run.advice`.

    Raises:
        ConfigError: the advice changes nothing that is set outside of the app's code, or the run
            cannot be repeated from its config.toml.
    """
    config, keys = SimulationConfig.read(run.folder / CONFIG), dict(advice.change)
    own = {STRATEGY: keys.pop(STRATEGY)} if STRATEGY in keys else {}
    if not advice.change:
        raise ConfigError(f"advice = {advice.do!r}: expected one that changes a setting of the app")
    now = changed(config, own, run_config=keys, costs={})
    beside = run.folder if run.folder.name else run.folder.resolve()
    out = new_folder(beside.with_name(run.name.partition(_ADVISED)[0] + _ADVISED))
    after = simulate_config(now, out, traces=TraceSet.load(config.traces, seed=config.seed))
    note_advice(run, after, advice)
    return report_at_end(after.folder)


def _server(
    strategy: Strategy | None,
    initial_arrays: ArrayRecord | Mapping[str, npt.ArrayLike] | None,
    until: str | None,
    evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None,
) -> ServerApp:
    """Return a ServerApp that starts a strategy."""
    if strategy is None or initial_arrays is None or until is None:
        needed = {"strategy": strategy, "initial_arrays": initial_arrays, "until": until}
        missing = [name for name, value in needed.items() if value is None]
        raise ConfigError(
            f"{' and '.join(missing)} missing: a ClientApp is run by a strategy, from its first "
            "model until an end such as '2h', '100 rounds' or 'accuracy 0.9'"
        )
    given = initial_arrays
    first = given if isinstance(given, ArrayRecord) else record_of(given)
    rounds = Until.parse(until).rounds
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=first,
            num_rounds=_ENDLESS if rounds is None else rounds,
            evaluate_fn=evaluate,
        )

    return app


def _variants(source: object) -> dict[str, list[Run]] | None:
    """Return finished runs as they are named, or by the settings that differ; None of a plan."""
    if isinstance(source, Mapping) and source and all(isinstance(x, list) for x in source.values()):
        variants = {name: [finished(run) for run in runs] for name, runs in source.items()}
        for name, runs in variants.items():
            if len({run.seed for run in runs}) != len(runs) or not runs:
                raise ConfigError(f"runs of {name!r}: expected one or more, each with another seed")
        return variants
    if not isinstance(source, Sequence) or isinstance(source, str):
        return None
    if not source:
        raise ConfigError("runs = []: expected at least one finished run")
    return grouped([finished(run) for run in source])


def _plan(
    source: str | Path | Mapping[str, Any] | Plan, overrides: Mapping[str, str | None]
) -> Plan:
    """Return a plan with some of its keys replaced."""
    if isinstance(source, Plan):
        table: Mapping[str, Any] = source.table()
    else:
        table = source if isinstance(source, Mapping) else read_toml(Path(source))
    given = {key: value for key, value in overrides.items() if value is not None}
    where = str(source) if isinstance(source, str | Path) else "plan"
    return Plan.from_table({**table, **given}, where=where)


def result_folder(out: str | Path | None, stack: ExitStack) -> Path:
    """Return the folder of results; a temporary one is removed as the stack closes."""
    if out is not None:
        return Path(out)
    made = TemporaryDirectory(prefix="fedstale-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(made))
