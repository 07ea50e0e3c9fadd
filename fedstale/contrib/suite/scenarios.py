"""Scenarios that never change, read from scenarios.toml, and checked by digests of their values.

A digest of devices is of what becomes of jobs on them, to a hundredth of a second, so that it knows
neither files nor layouts; that of data is of the examples of each device, for all skews.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedstale.errors import ConfigError, nearest
from fedstale.flower import identity, record_of
from fedstale.simulation import FlowerApp
from fedstale.traces import Array, Job, Status, TraceSet
from fedstale.traces.sources import SOURCES
from fedstale.version import __version__

LOOKS = 96
"""Instants of the budget at which a job is sent to each device, for digests and speeds."""
_DATA = {"text": "a play as .txt or .gz", "data": "the folder of its four files"}
"""Keys of run configs that say where data are."""
_ROOT = Path(__file__).parents[3]
_CARS = _ROOT / "fedstale" / "agents" / "cars.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a method is told: jobs in flight, updates of a step, time-out of a job in s, ..."""

    name: str
    n_devices: int
    concurrency: int
    buffer_size: int
    timeout_s: float
    seed: int


class Task:
    """An app, and what each device has of its data."""

    def __init__(self, name: str, data: str = "") -> None:
        """Import digits or an example, with a path of its data; ConfigError if it is not here."""
        places = [folder for folder in (Path(name), _ROOT / "examples" / name) if folder.is_dir()]
        if not places and name != "digits":
            where = f"expected examples/{name} of fedstale's repository in ./{name}"
            raise ConfigError(f"task = {name!r}: its app is not here; {where}")
        self.app = FlowerApp.find(name if name == "digits" else places[0])
        self.name, self.own = name, {key: data for key in _DATA if key in self.app.defaults}
        self.has_skew = "alpha" in self.app.defaults
        with self.app.importable():
            self._client = self.app.load_client()
            module, _, job = (self.app.batched or {}).get("job", "").partition(":")
            self._job = getattr(import_module(module), job) if job else None

    def examples(self, skew: float, seed: int, n: int) -> list[Array]:
        """Return what n devices train on, one after the other; ConfigError if it is not here."""
        try:
            jobs = [self._job(*of) for of in self._asked({}, "train", skew, seed, n) if self._job]
        except (OSError, ValueError) as problem:
            why, wanted = str(problem).partition("; ")[0], [_DATA[key] for key in self.own]
            told = f"expected --data, {', '.join(wanted)} ({why})"
            raise ConfigError(f"task = {self.name!r}: its data are missing: {told}") from None
        return [part.numpy() for job in jobs for part in job["data"]]

    def right(self, model: Mapping[str, Any], skew: float, seed: int, n: int) -> Array:
        """Return the accuracy of a model on what each of n devices holds back, and on how many."""
        asked = self._asked(model, "evaluate", skew, seed, n)
        found = (self._client(*of).content["metrics"] for of in asked)
        return np.array([[one["eval_accuracy"], one["num-examples"]] for one in found]).T

    def _asked(
        self, model: Mapping[str, Any], kind: str, skew: float, seed: int, n: int
    ) -> Iterator[tuple[Message, Context]]:
        config = {**self.app.defaults, **self.own, "alpha": skew, "seed": seed}
        content = RecordDict({"arrays": record_of(model)})
        with identity(1):
            for i in range(n):
                place: dict[str, Any] = {"partition-id": i, "num-partitions": n}
                message = Message(content, dst_node_id=i + 1, message_type=kind)
                yield message, Context(1, i + 1, place, RecordDict(), config)


@dataclass(frozen=True)
class Setting:
    """A scenario as scenarios.toml has it, or the same on a folder of recorded devices."""

    name: str
    table: Mapping[str, Any]
    recordings: Path | None = None

    @classmethod
    def all(cls) -> dict[str, "Setting"]:
        """Read all scenarios."""
        text = Path(__file__).with_name("scenarios.toml").read_text(encoding="utf-8")
        return {name: cls(name, table) for name, table in tomllib.loads(text).items()}

    @classmethod
    def find(cls, name: str, recordings: Path | None = None) -> "Setting":
        """Return a scenario, or NAME@recorded; ConfigError if there is none."""
        found = cls.all()
        if name not in found:
            raise ConfigError(f"scenario = {name!r}: expected {nearest(name, [*found])}")
        if recordings is None:
            return found[name]
        if "recorded" not in found[name].table:
            raise ConfigError(f"scenario = {name!r}: nothing of its kind is recorded")
        return cls(f"{name}@recorded", {**found[name].table, "digests": {}}, recordings)

    def seen(self, seed: int) -> Scenario:
        """Return what a method is told of a run."""
        keys = ("n_devices", "concurrency", "buffer_size", "timeout_s")
        own = {key: self.table[key.replace("_", "-")] for key in keys}
        return Scenario(name=self.name, seed=seed, **own)

    def skews(self, task: Task) -> list[float]:
        """Return the concentrations by which labels are dealt; one of 1 where none are."""
        return list(self.table["skews"]) if task.has_skew else [1.0]

    def devices(self, seed: int, task: Task) -> tuple[TraceSet, Array]:
        """Return devices, and the mean time of a job on each in s, at most the time-out; (n,).

        Raises:
            ConfigError: they, or the data of the task, are not those of the scenario.
            TraceError: a recording is missing or damaged.
        """
        about, n = self.table, self.table["n-devices"]
        if self.recordings is None:
            kind = _CARS if about["population"] == "cars" else about["population"]
            made = TraceSet.synthetic(n, seed=seed, population=kind)
        else:
            parts: Any = {k: _read(self.recordings, x) for k, x in about["recorded"].items()}
            share = about.get("uplink-share")
            made = TraceSet.compose(n=n, seed=seed, days=3, uplink_share=share, **parts)
        sent = np.tile(3600.0 * about["budget-h"] / LOOKS * np.arange(LOOKS), n)
        n_bytes, most_s = about["model-bytes"], about["timeout-s"]
        job = Job(work=about["work"], download_bytes=n_bytes, upload_bytes=n_bytes, ttl_s=most_s)
        trips = made.trips(np.repeat(np.arange(n), LOOKS), sent, job)
        took = np.where(trips.status == Status.REPORTED, trips.reported, np.inf) - sent
        waits = np.minimum(took, most_s).reshape(n, LOOKS)
        self._check("devices", seed, [np.rint(100.0 * waits).astype("<i8")])
        held = [x for skew in self.skews(task) for x in task.examples(skew, seed, n)]
        self._check(task.name, seed, held)
        return made, waits.mean(axis=1)

    def _check(self, what: str, seed: int, arrays: list[Array]) -> None:
        text = b"".join(f"{x.shape}".encode() + x.tobytes() for x in arrays)
        digest = sha256(text).hexdigest()[:16]
        expected = self.table.get("digests", {}).get(what, {}).get(str(seed), digest)
        if digest != expected:
            made = "devices" if what == "devices" else f"data of {what}"
            raise ConfigError(
                f"fedstale {__version__} makes other {made} than {self.name}: digest {digest} "
                f"instead of {expected} with seed {seed}; no score of the table holds here"
            )


@cache
def _read(folder: Path, source: str | float) -> TraceSet:
    """Read a recording as it is fetched, or make a desktop, of a speed and links of 100 Mbit/s."""
    if not isinstance(source, str):
        return TraceSet.constant(1, compute=source, downlink_bit_per_s=1e8, uplink_bit_per_s=1e8)
    files = SOURCES[source].files
    return TraceSet.read(folder / (source if len(files) > 1 else files[0].filename), source)
