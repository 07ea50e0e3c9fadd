"""What is to be compared, read from a TOML file, and the processes that run it.

Keys at the top hold for all variants, in the words of `SimulationConfig`; the table of a variant
replaces them, and its tables run-config and costs are merged key by key. Every (variant, seed)
becomes one resolved configuration, checked against the app before anything runs.

Each run is an ordinary run folder. A run whose folder holds its end is not repeated, one that was
interrupted or killed goes on from its last checkpoint, one that failed begins anew. Traces that
several runs need are read once, and their arrays are in the memory of the machine once.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstale.cluster import joined
from fedstale.config import SimulationConfig, flat
from fedstale.errors import ConfigError, FedstaleError, nearest
from fedstale.flower import command_line
from fedstale.live import Watcher
from fedstale.parallel import Report, WorkerPool
from fedstale.runs import CONFIG, is_empty, status_of
from fedstale.simulation import FlowerApp, simulate
from fedstale.strategies.server import Runtime
from fedstale.strategies.types import n_cores
from fedstale.traces import TraceSet
from fedstale.traces.io import Shared, share
from fedstale.until import Until

if TYPE_CHECKING:
    from fedstale.comparison.cluster_pool import ClusterPool

_OWN = ("seeds", "target", "reference", "variants")
_TABLES = ("run-config", "costs")
_SETTINGS = tuple(f.name.replace("_", "-") for f in fields(SimulationConfig) if f.name != "seed")
_REPORT_EVERY_S = 0.5
_ONE_PROCESS = ("inline", "batched")

State = Literal["new", "half", "failed", "done"]
Watch = Callable[[Mapping[Path, float]], None]
"""Called with the share of each run that is over, by folder, whenever one has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a comparison."""

    variant: str
    config: SimulationConfig
    """Resolved settings."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """What a process is given."""

    run: PlannedRun
    begun: State
    """How far the run is."""
    traces: Shared[TraceSet] | None = None
    """Its traces, if other processes of this machine need them too."""
    pause_at: float = inf
    """Virtual instant in s at which it is interrupted, to go on later."""
    app: Path | None = None
    """Where the app is on this machine, if not where the settings say."""
    recording: Path | None = None
    """The same of the file of its traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Variants, and the seeds with which each of them runs."""

    shared: Mapping[str, Any]
    """Settings of all variants, by dashed key."""
    variants: Mapping[str, Mapping[str, Any]]
    """Settings of each variant that replace the shared ones."""
    seeds: tuple[int, ...]
    reference: str
    """The variant that the others are compared with."""
    target: str | None = None
    """A metric and the value that it is to reach, as in `until`."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str) -> "Plan":
        """Return the plan in a table, rejecting what means nothing.

        Raises:
            ConfigError: a key is unknown or missing, or a value is out of range.
        """
        own = {key: table.get(key) for key in _OWN}
        rest = {key: value for key, value in table.items() if key not in own}
        shared = _settings(rest, where, known=(*_OWN, *_SETTINGS))
        variants = _variants(own["variants"], where)
        reference = table.get("reference", next(iter(variants)))
        if not isinstance(reference, str) or reference not in variants:
            raise ConfigError(
                f"{where}: reference = {reference!r}: expected {nearest(reference, variants)}"
            )
        if not isinstance(own["target"], str | None):
            raise ConfigError(f"{where}: target = {own['target']!r}: expected a text")
        check_target(own["target"])
        plan = cls(
            shared=shared,
            variants=variants,
            seeds=seeds_in(own["seeds"], f"{where}: seeds"),
            reference=reference,
            target=own["target"],
        )
        for name in variants:
            for key in ("app", "traces"):
                if key not in shared and key not in variants[name]:
                    raise ConfigError(f"{where}: {key} is missing, for all or for {name!r}")
            plan._given(name, seed=0)
        return plan

    def config(self, variant: str, seed: int) -> SimulationConfig:
        """Return the resolved settings of a run, as its folder keeps them.

        Raises:
            ConfigError: the app, or a value, is not usable.
        """
        config = self._given(variant, seed)
        try:
            app = FlowerApp.find(config.app)
            resolved = app.resolved(config)
            if app.is_built_in:
                # Loads all strategies, which a comparison of other apps never does here.
                from fedstale.apps.strategy import check  # noqa: PLC0415

                check(resolved.run_config)
            return resolved
        except ConfigError as problem:
            raise ConfigError(f"variant {variant!r}: {problem}") from None

    def runs(self, folder: Path) -> list[PlannedRun]:
        """Return all runs: all variants of a seed, then the next, so that pairs come whole.

        Args:
            folder: where the folders of the variants are, each with one folder a seed.

        Raises:
            ConfigError: the app, or a value, is not usable.
        """
        return [
            PlannedRun(
                variant=variant,
                config=self.config(variant, seed),
                folder=folder / folder_name(variant) / str(seed),
            )
            for seed in self.seeds
            for variant in self.variants
        ]

    def table(self) -> dict[str, Any]:
        """Return the plan as a table that `from_table` reads."""
        own = {"seeds": list(self.seeds), "reference": self.reference}
        own |= {} if self.target is None else {"target": self.target}
        return {**self.shared, **own, "variants": {k: dict(v) for k, v in self.variants.items()}}

    def _given(self, variant: str, seed: int) -> SimulationConfig:
        """Return the settings of a run as the plan gives them."""
        shared, own = self.shared, self.variants[variant]
        merged = {name: {**shared.get(name, {}), **own.get(name, {})} for name in _TABLES}
        table = {key.replace("-", "_"): v for key, v in {**shared, **own, **merged}.items()}
        # Runs are already side by side: processes for clients would only get in their way.
        table.setdefault("executor", "inline" if table.get("workers") is None else "auto")
        try:
            return SimulationConfig(**table, seed=seed)
        except ConfigError as problem:
            raise ConfigError(f"variant {variant!r}: {problem}") from None


def folder_name(variant: str) -> str:
    """Return a name for a variant's folder, distinct and safe, whatever the variant is called.

    Example:
        >>> folder_name("Gap-Aware"), folder_name("../b c")
        ('Gap-Aware', 'b-c-2dc68644')
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", variant):
        return variant
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", variant).strip("-")[:40]
    digest = hashlib.blake2b(variant.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{safe}-{digest}" if safe else digest


def check_target(target: str | None) -> None:
    """Check that a target, if there is one, is a metric and its value.

    Raises:
        ConfigError: it is something else.
    """
    with suppress(ConfigError):
        if target is None or Until.parse(target).metric is not None:
            return
    raise ConfigError(
        f"target = {target!r}: expected a metric and the value that it is to reach, such as "
        "'accuracy 0.9'"
    )


def run_all(
    runs: Sequence[PlannedRun],
    *,
    workers: int | None,
    log: Path,
    overwrite: bool = False,
    watch: Watch,
    address: str | None = None,
) -> dict[Path, str]:
    """Run what is not done yet.

    Args:
        runs: the runs.
        workers: processes at a time; None takes one for each core.
        log: file that gets what runs print.
        overwrite: whether finished and unfinished runs are begun anew.
        watch: called with how far the runs are.
        address: of a Ray cluster whose nodes have the processes; None of this machine.

    Returns:
        Why a run failed, by its folder, in the order of the runs; all others are done.

    Raises:
        ConfigError: a folder holds another run, or a run cannot begin; the others keep what they
            have done.
        KeyboardInterrupt: it was asked to stop; the runs keep what they have done. The message
            states how many are done.
    """
    states = {run.folder: "failed" if overwrite else state_of(run) for run in runs}
    todo = [run for run in runs if states[run.folder] != "done"]
    shares = {run.folder: float(states[run.folder] == "done") for run in runs}
    watch(shares)
    failed: dict[Path, str] = {}
    try:
        with ExitStack() as stack:
            pool: ClusterPool | WorkerPool[RunJob]
            if address is None or not todo:
                pool, cores = stack.enter_context(WorkerPool(carried_out, log)), n_cores()
            else:
                pool, cores = _cluster_pool(todo, address, log, stack)
                if not (cores or workers):
                    raise ConfigError(
                        f"address = {address!r}: it has no cores yet; pass a number of workers"
                    )
            traces = _shared_traces([] if address else todo, log.parent, stack)
            jobs = (RunJob(run=r, begun=states[r.folder], traces=traces(r)) for r in todo)
            for job, news, what in pool.work(jobs, workers or cores):
                run, folder = job.run, job.run.folder
                if news == "rejected":
                    raise _not_begun(run, what)
                if news == "died" or (news == "done" and what):
                    failed[folder] = " ".join(what.split())
                shares[folder] = what if news == "progress" else 1.0
                watch(shares)
    except KeyboardInterrupt:
        n_done = sum(state_of(run) == "done" for run in runs)
        raise KeyboardInterrupt(f"interrupted with {n_done} of {len(runs)} runs done") from None
    return {run.folder: failed[run.folder] for run in runs if run.folder in failed}


def state_of(run: PlannedRun) -> State:
    """Return how far a run is, by what its folder holds.

    Raises:
        ConfigError: the folder holds another run, or what is no run.
    """
    if not (run.folder / CONFIG).is_file():
        if not is_empty(run.folder):
            raise ConfigError(
                f"{str(run.folder)!r} holds something that is no run: expected an empty folder "
                "or none; choose another --out"
            )
        return "new"
    changed = SimulationConfig.read(run.folder / CONFIG).differing(run.config)
    if changed:
        raise ConfigError(
            f"{str(run.folder)!r} holds a run with {changed}: choose another --out, or pass "
            "--overwrite to run everything again"
        )
    ended: dict[str, State] = {"": "half", "interrupted": "half", "failed": "failed"}
    return ended.get(status_of(run.folder), "done")


def _cluster_pool(
    runs: Sequence[PlannedRun], address: str, log: Path, stack: ExitStack
) -> tuple["ClusterPool", int]:
    """Join a Ray cluster, and return what carries out runs there, and how many cores it has.

    Raises:
        ConfigError: the cluster cannot be joined, or a run asks for more than one process.
    """
    # Ray is an extra, and takes seconds to import.
    from fedstale.comparison.cluster_pool import ClusterPool, bundles_of  # noqa: PLC0415

    configs = [run.config for run in runs]
    _require_one_process(configs)
    cores = stack.enter_context(joined(address))
    return stack.enter_context(ClusterPool(bundles_of(configs), log)), cores


def _shared_traces(
    runs: Sequence[PlannedRun], folder: Path, stack: ExitStack
) -> Callable[[PlannedRun], Shared[TraceSet] | None]:
    """Return a function that gives the traces of a run; None if no other run needs them.

    They are read when they are first needed, into files that all processes map into their memory.
    The stack deletes the files; processes that have mapped them keep what they have.
    """

    def key(run: PlannedRun) -> tuple[str, int]:
        # Recordings do not depend on the seed of a run.
        is_drawn = TraceSet.is_synthetic(run.config.traces)
        return run.config.traces, run.config.seed if is_drawn else 0

    uses, shared = Counter(map(key, runs)), dict[tuple[str, int], Shared[TraceSet]]()

    def of(run: PlannedRun) -> Shared[TraceSet] | None:
        if uses[key(run)] > 1 and key(run) not in shared:
            path = folder / f".traces-{len(shared)}"
            try:
                traces = TraceSet.load(run.config.traces, seed=run.config.seed)
                shared[key(run)] = share(traces, path)
            except (FedstaleError, OSError) as problem:
                raise _not_begun(run, problem) from None
            stack.callback(path.unlink, missing_ok=True)
        return shared.get(key(run))

    return of


def _require_one_process(configs: Iterable[SimulationConfig]) -> None:
    """Check that each run takes one core, as it does on a worker of a cluster.

    Raises:
        ConfigError: one asks for processes or actors of its own.
    """
    for config in configs:
        if config.executor not in _ONE_PROCESS or config.client_limit_s is not None:
            raise ConfigError(
                f"executor = {config.executor!r}: with an address each run is one process on one "
                "core of the cluster; leave executor, workers, gpus and client-limit-s out"
            )


def _not_begun(run: PlannedRun, problem: object) -> ConfigError:
    return ConfigError(f"variant {run.variant!r}, seed {run.config.seed}: {problem}")


class _ShareDone(Watcher):
    """Reports how much of a run is done."""

    def __init__(self, until: Until, report: Report) -> None:
        super().__init__(until, every_s=_REPORT_EVERY_S)
        self._report = report

    def look(self, run: Runtime) -> None:
        self._report(self.until.share(run.now(), self.rounds) or 0.0)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Report nothing: if the first process is gone, the run's folder is still to be written."""


def carried_out(job: RunJob, report: Report) -> str:
    """Simulate, in a process that does nothing else, and return why the run failed if it did."""
    command_line.console().setLevel(logging.ERROR)
    config = job.run.config
    if job.recording is not None:
        traces = _recorded(str(job.recording))
    else:
        traces = job.traces.open() if job.traces else TraceSet.load(config.traces, seed=config.seed)
    run = simulate(
        config,
        job.run.folder,
        traces=traces,
        app=FlowerApp.find(job.app) if job.app else None,
        overwrite=job.begun == "failed",
        resume=job.begun == "half",
        pause_at=job.pause_at,
        callbacks=[_ShareDone(Until.parse(config.until), report)],
    )
    if run.status == "interrupted" and run.end_s < job.pause_at:
        raise KeyboardInterrupt
    return (run.reason or "it failed") if run.status == "failed" else ""


@lru_cache(maxsize=1)
def _recorded(path: str) -> TraceSet:
    """Load traces that the next run of this process needs again."""
    return TraceSet.load(path, seed=0)


def _variants(table: object, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            f"{where} has no variants: expected at least one table such as [variants.FedAvg]"
        )
    for name, settings in table.items():
        if not name.strip() or not name.isprintable():
            raise ConfigError(f"{where}: variant {name!r}: expected a name of printable characters")
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{where}: variants.{name} = {settings!r}: expected a table of settings"
            )
    return {
        name: _settings(settings, f"{where}: variant {name!r}", known=_SETTINGS)
        for name, settings in table.items()
    }


def seeds_in(value: object, where: str, *, least: int = 1) -> tuple[int, ...]:
    """Return the seeds in a list.

    Args:
        value: the list.
        where: it stands, for the sentence of an error.
        least: how many there must be.

    Raises:
        ConfigError: it is no list of so many distinct whole numbers >= 0.
    """
    fine = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    if not isinstance(value, list) or not fine or len(value) < least:
        raise ConfigError(
            f"{where} = {value!r}: expected at least {least} whole numbers >= 0 such as "
            "[1, 2, 3, 4, 5]"
        )
    if len(set(value)) < len(value):
        raise ConfigError(f"{where} = {value!r}: expected each once")
    return tuple(value)


def _settings(table: Mapping[str, Any], where: str, *, known: Sequence[str]) -> dict[str, Any]:
    """Return settings by dashed key; a run's config.toml spells the same with underscores."""
    found: dict[str, Any] = {}
    for given, value in table.items():
        key = given.replace("_", "-")
        if key not in _SETTINGS:
            raise ConfigError(f"{where}: unknown key {given!r}: expected {nearest(key, known)}")
        if key in found:
            raise ConfigError(f"{where}: {key} is there twice, with and without underscores")
        if key in _TABLES and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} = {value!r}: expected a table")
        found[key] = dict(flat(value)) if key in _TABLES else value
    return found
