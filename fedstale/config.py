"""The settings of a simulation, the same in Python, on the command line and in TOML.

A run writes its resolved settings to `config.toml`, which reads back to an equal object.
"""

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from fedstale.errors import ConfigError, nearest
from fedstale.until import Until

ExecutorKind = Literal["auto", "inline", "processes", "batched", "ray"]
"""The executors that can run clients."""

_PLAIN = "a table of numbers, texts, true and false"
NODE_VALUES = f"a device id with {_PLAIN}"
"""What each entry of a node config is expected to be."""
NodeTables = Mapping[str, Mapping[str, Any]]
"""What devices have in their node config, by device id."""
_OPTIONAL = (
    *("devices", "partitions", "node_config", "strategy", "seed_key"),
    *("workers", "gpus", "client_limit_s"),
)


def instant_s(value: object, name: str) -> float:
    """Return a time such as "30m" or "4h" in s.

    Args:
        value: the text.
        name: of the setting, for the message.

    Raises:
        ConfigError: it is no time, or 0.
    """
    found = inf
    if isinstance(value, str):
        with suppress(ConfigError):
            found = Until.parse(value).time_s
    if not 0 < found < inf:
        raise ConfigError(f"{name} = {value!r}: expected a time such as 30m or 4h")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What to simulate."""

    app: str
    """Directory of a Flower app, or name of a built-in one."""
    traces: str
    """File of traces, synthetic:N for generated phones, synthetic:N@desktops or @sites, or
    ideal:N."""
    devices: int | None = None
    """How many devices of the traces to enrol, drawn with the seed; all if not given."""
    partitions: int | None = None
    """Partitions of the app's data: partition ids count up to it and begin again, so that devices
    share data. As many as there are devices if not given."""
    node_config: str | NodeTables | None = None
    """What devices have in their node config besides: tables by device id, or a file of TOML that
    has them."""
    strategy: str | None = None
    """What takes the place of the app's own strategy, such as 'FedBuff(20, 5)'; of an app whose run
    config has such a text, the text."""
    seed: int = 0
    """Seeds everything that is random."""
    seed_key: str | None = None
    """Key of the app's run config that takes the seed, unless `run_config` sets it: what the app's
    [tool.fedstale] says, or `seed` if the app has it, if not given; none if empty."""
    until: str | None = None
    """When to end: a virtual time (2d), rounds (100 rounds) or a metric (accuracy 0.9)."""
    on_interrupt: Literal["abort", "pause"] = "abort"
    """What happens to a job when its device goes offline: the work is lost, or waits."""
    after_end: Literal["repeat", "stop"] = "repeat"
    """What follows when a trace is over."""
    executor: ExecutorKind = "auto"
    """What runs clients; auto measures, and takes this process or a process a core. All but batched
    give the same bytes; batched, which trains many clients as one program, rounds otherwise."""
    workers: int | None = None
    """Processes that run clients; 1 runs them in the main process; as the executor decides if not
    given."""
    client_limit_s: float | None = None
    """Wall-clock s after which a client that has not answered gets an error reply; for the executor
    processes. No limit if not given, since no number suits every app and machine."""
    gpus: float | None = None
    """GPUs of each Ray actor, such as 0.25 where four share one; for the executor ray alone."""
    checkpoint_every: int = 1
    """Versions from one checkpoint to the next; 0 writes none."""
    run_config: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Overrides of the app's run config."""
    costs: Mapping[str, int | float | str] = field(default_factory=dict)
    """Overrides of the app's [tool.fedstale] table, with its dashed keys."""

    def __post_init__(self) -> None:
        kinds, optional = get_args(ExecutorKind), _OPTIONAL
        for name, holds, accepted in (
            ("app", isinstance(self.app, str), "a text"),
            ("traces", isinstance(self.traces, str), "a text"),
            ("executor", self.executor in kinds, f"one of {kinds}"),
            ("devices", _is_number(self.devices, 1), "a whole number >= 1"),
            ("partitions", _is_number(self.partitions, 1), "a whole number >= 1"),
            ("node_config", isinstance(self.node_config, str | Mapping), "a file, or tables"),
            ("strategy", isinstance(self.strategy, str), "a text such as 'FedBuff(20, 5)'"),
            ("workers", _is_number(self.workers, 1), "a whole number of processes >= 1"),
            ("seed", _is_number(self.seed, 0), "a whole number >= 0"),
            ("seed_key", isinstance(self.seed_key, str), "a key of the app's run config"),
            (
                "checkpoint_every",
                _is_number(self.checkpoint_every, 0),
                "a whole number of versions >= 0 (0 writes no checkpoints)",
            ),
            (
                "client_limit_s",
                _is_number(self.client_limit_s, 0, int | float) and self.client_limit_s != 0,
                "a number of seconds > 0",
            ),
            (
                "gpus",
                self.executor == "ray" and _is_number(self.gpus, 0, int | float) and self.gpus != 0,
                "a number > 0, with executor = 'ray'",
            ),
            ("on_interrupt", self.on_interrupt in ("abort", "pause"), "'abort' or 'pause'"),
            ("after_end", self.after_end in ("repeat", "stop"), "'repeat' or 'stop'"),
            ("run_config", _is_plain(self.run_config), _PLAIN),
            ("costs", _is_plain(self.costs), _PLAIN),
        ):
            value = getattr(self, name)
            if not holds and not (value is None and name in optional):
                raise ConfigError(f"{name} = {value!r}: expected {accepted}")
        Until.parse(self.until)

    @property
    def planned_rounds(self) -> int | None:
        """Rounds that the app will make, if its run config says so by the usual name."""
        planned = self.run_config.get("num-server-rounds")
        return planned if isinstance(planned, int) else None

    def table(self) -> dict[str, Any]:
        """Return the settings as `from_table` reads them; what is not set is left out."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def read(cls, path: Path) -> "SimulationConfig":
        """Read settings from TOML.

        Raises:
            ConfigError: the file cannot be read, or a key is unknown or missing.
        """
        return cls.from_table(read_toml(path), where=str(path))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, where: str) -> "SimulationConfig":
        """Build settings from a table of keys, rejecting keys that mean nothing."""
        known = [f.name for f in fields(cls)]
        for key in table:
            if key not in known:
                raise ConfigError(f"{where}: unknown key {key!r}: expected {nearest(key, known)}")
        missing = [name for name in ("app", "traces") if name not in table]
        if missing:
            raise ConfigError(f"{where}: {missing[0]} is missing")
        return cls(**table)

    def effective(self) -> dict[str, Any]:
        """Return the settings that results depend on, those of tables under `table.key`.

        Where and how often something is computed or kept changes nothing of what comes out.
        """
        found = {key.replace("_", "-"): value for key, value in asdict(self).items()}
        for name in ("app", "traces", "node-config"):
            # However it is spelt, a path means a place.
            if isinstance(found[name], str) and Path(found[name]).exists():
                found[name] = str(Path(found[name]).resolve())
        # What the key has got stands in the run config.
        del found["seed-key"]
        del found["workers"], found["checkpoint-every"], found["client-limit-s"]
        # All others give the same bytes.
        found["executor"] = "batched" if self.executor == "batched" else "exact"
        tables = {name: found.pop(name) for name in ("run-config", "costs")}
        return found | {f"{t}.{key}": v for t, inner in tables.items() for key, v in inner.items()}

    def differing(self, now: "SimulationConfig") -> str:
        """Return in words which settings that results depend on are others now, or nothing."""
        old, new = self.effective(), now.effective()
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        return ", ".join(f"{key} = {old.get(key)!r} instead of {new.get(key)!r}" for key in keys)


_WORK = "work."
_MESSAGE_TYPES = ("train", "evaluate", "query", "get_parameters", "get_properties")

FLOWER_OVERHEAD = {"download-overhead-s": 0.3, "upload-overhead-s": 0.5}
"""What Flower 1.41 needs for each message to a node that `fedstale node` runs, besides bytes and
training. Medians of benchmarks/fidelity/run.py on two quiet cores; other machines differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What an app declares about its own work: `[tool.fedstale]` in its pyproject.toml."""

    work_per_example: float | None = None
    """Work units to train one example once; one unit is one second of the reference device."""
    epochs: int | str | None = None
    """Passes over the examples of one training job, or the run-config key that holds the number."""
    examples: float | None = None
    """Expected examples of a client, until its first reply tells."""
    evaluate_work_per_example: float | None = None
    """Work units to evaluate one example; a client's reply states how many there were."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Work units of a whole message by its type, or by its type and action: 0 where nothing is
    trained. Comes before what is said by example. A query without an entry costs 0, as it reads
    what the device knows already; but one of the app's own that is sent a model must have one."""
    model_bytes: int | None = None
    """Bytes that the model stands for: what a message holds counts as many times more as this is
    more than the first model sent; as sent if not given."""
    constant_replies: bool = False
    """Whether the app promises that its replies to training messages have the same bytes. Clients
    then train only if their reply is delivered; a reply of another size ends the run."""
    download_overhead_s: float | None = None
    """Seconds from the sending, or from when the device is free, to the start of the download: what
    the platform needs besides the bytes; 0 if not given."""
    upload_overhead_s: float | None = None
    """Seconds from the end of the upload to the server's seeing the reply; 0 if not given."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "epochs":
                holds = isinstance(value, int | str) and not isinstance(value, bool)
                accepted = "a number or a run-config key"
            elif name == "work":
                holds = all(_is_number(units, 0, int | float) for units in value.values())
                accepted = "a finite number >= 0 for each type of message"
            elif name == "constant_replies":
                holds, accepted = isinstance(value, bool), "true or false"
            elif name.endswith("_bytes"):
                holds, accepted = _is_number(value, 0), "a whole number of bytes >= 0"
            else:
                holds, accepted = _is_number(value, 0, int | float), "a finite number >= 0"
            if value is not None and not holds:
                raise ConfigError(f"costs.{name} = {value!r}: expected {accepted}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Costs":
        """Return the costs in a TOML table with dashed keys, rejecting keys that mean nothing.

        The work of a kind of message stands in a table `work`, or under `work.KIND`.
        """
        known = {f.name.replace("_", "-"): f.name for f in fields(cls)}
        found: dict[str, Any] = {}
        for key, value in flat(table):
            if key.startswith(_WORK):
                kind = key.removeprefix(_WORK)
                if kind.split(".")[0] not in _MESSAGE_TYPES:
                    raise ConfigError(
                        f"[tool.fedstale] work has {kind!r}: expected a type of message, one of "
                        f"{', '.join(_MESSAGE_TYPES)}, alone or with its action, such as train.fit"
                    )
                found.setdefault("work", {})[kind.removesuffix(".default")] = value
            elif key in known and key != "work":
                found[known[key]] = value
            else:
                raise ConfigError(
                    f"costs has unknown key {key!r}: expected {nearest(key, sorted(known))}"
                )
        return cls(**found)

    def table(self) -> dict[str, Any]:
        """Return the declared costs with dashed keys, as for `from_table`; no inner table."""
        plain = {k.replace("_", "-"): v for k, v in asdict(self).items() if v is not None}
        del plain["work"]
        return plain | {_WORK + kind: units for kind, units in self.work.items()}

    def resolved(self, run_config: Mapping[str, Any]) -> "Costs":
        """Return the costs with the number of epochs looked up in the run config."""
        if not isinstance(self.epochs, str):
            return self
        if self.epochs not in run_config:
            raise ConfigError(
                f"costs.epochs = {self.epochs!r}: expected a number or one of the run-config keys "
                f"{sorted(run_config)}"
            )
        epochs = run_config[self.epochs]
        is_number = isinstance(epochs, int | float) and not isinstance(epochs, bool)
        if not is_number or epochs < 0 or epochs % 1:
            raise ConfigError(
                f"run-config {self.epochs} = {epochs!r}: expected a whole number of epochs >= 0"
            )
        return replace(self, epochs=int(epochs))


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a table and of the tables in it, under keys joined by dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_options(settings: Mapping[str, Any]) -> str:
    """Return a strategy and a run config as options of `fedstale simulate`, to paste.

    Example:
        >>> as_options({"run-config": {"is-warm": True}, "strategy": "FedBuff(10, 5)"})
        "--strategy 'FedBuff(10, 5)' -c is-warm=true"
    """
    # Flower ends a text at the first quote of the kind that it begins with.
    keys = " ".join(
        f"{key}='{value}'" if '"' in str(value) else f"{key}={json.dumps(value)}"
        for key, value in flat(settings.get("run-config", {}))
    )
    given = {"--strategy": settings.get("strategy"), "-c": keys}
    return shlex.join(word for name, text in given.items() if text for word in (name, text))


def _is_number(value: object, least: float, kind: Any = int) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value < inf


def _is_plain(table: object) -> bool:
    return isinstance(table, Mapping) and all(
        isinstance(value, bool | int | float | str) for value in table.values()
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a file that a person wrote.

    Raises:
        ConfigError: the file cannot be read as TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} cannot be read as TOML: {problem}") from None
