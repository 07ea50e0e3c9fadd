"""One run of a built-in app whose messages have some format, on recorded phones and links.

Phones are those of `agent_training`: the ones that appear in some hours of a log, with half a day
before that, which their forecasts look back on. Their links are 5G sessions, as `recorded_fleets`
joins them, or the four LTE and UMTS links of mahimahi, one of them for each phone, from an instant
of its own on. Bytes are scaled to those of the model that the app's network stands for.

Replies go through `CompressionMod`, and through `ForecastMod` where formats go by forecasts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from agent_training import FLEETS, windows
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from forecasting import examples
from recorded_fleets import fleets
from selection_training import HOURS_S, SPENT, Window
from training_apps import opened

from fedstale.client import CompressionMod, ForecastMod
from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import Compression, FedBuff
from fedstale.strategies.messages import FORMATS, n_bytes, records
from fedstale.strategies.server import validation
from fedstale.strategies.types import Array, FormatName, Job, median_of
from fedstale.traces import TraceSet
from fedstale.traces.arrays import stream
from fedstale.traces.forecast import Forecaster, Oracle, Persistence, embedded

FLEET, DIVISION = "phones", 0
"""The embedded forecaster has learnt "learn" of this division, and was stopped early on "stop"."""
HISTORY_S = FLEETS[FLEET].history_s
CONCURRENCY, BUFFER_SIZE = 10, 5
TIMEOUT_S = 3600.0
EVERY_S = 60.0
"""Time between two evaluations, at least."""
N_EXAMPLES = 10_000
"""That persistence counts the spread of rates on."""
SHARE = 0.15
"""Longest upload by forecast, as a share of download and training."""
_LINKS = 71
_SPARSE = 3
"""Bytes of a number that top-k sends: two for its place, one for its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which model crosses which links."""

    app: str
    model_bytes: int
    links: str
    """A file of the recordings; "uccmisl-5g.zip" are those of the fleet."""
    alpha: float | None = 0.3
    """Concentration of the deal; None for an app that deals in one way."""


class ByForecast(Compression):
    """Asks each node for the finest format whose upload is a small share of its job.

    Of the formats from in full to int2 it is the first whose upload takes at most a share of
    download and training together, by medians of the forecast that the node last sent.
    """

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Choose the format of a node's next reply."""
        self.up = self._format(job.node_id)
        return super().outgoing(job, content)

    def _format(self, node_id: int) -> FormatName | None:
        forecast, bytes_of = self._run.history.forecast_of(node_id), self._run.bytes_in
        upload_s, total_s = (median_of(forecast, name) for name in ("reporting_s", "total_s"))
        if not 0.0 <= upload_s <= total_s < inf:
            return "int8"
        most_s = SHARE * (total_s - upload_s)
        last = bytes_of(self._last.get(node_id))
        fits = (f for f in (None, *FORMATS) if upload_s * bytes_of(f) / last <= most_s)
        return next(fits, FORMATS[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How messages are made smaller."""

    compression: Compression | None = None
    forecaster: str = ""
    """What devices forecast by: "lstm", "persistence" or "oracle"; empty for no forecasts."""
    is_sparse: bool = False
    """Replies hold the largest elements alone, in as many bytes as their format has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run came to; lists of one length, one entry for each evaluation."""

    at_s: list[float]
    accuracy: list[float]
    device_s: list[float]
    """Device time that jobs had taken by then, in s."""
    up_bytes: list[float]
    down_bytes: list[float]
    jobs: int
    versions: int


class WithMods(Executor):
    """Trains as another executor does, with mods around every message."""

    def __init__(self, then: Executor, mods: Sequence[Mod]) -> None:
        self._then, self._mods = then, mods

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Answer one message after the other."""
        return [self._answer(call) for call in calls]

    def _answer(self, call: ClientCall) -> ClientReply:
        def trained(message: Message, context: Context) -> Message:
            return self._then.run([ClientCall(message, context, call.seed)])[0].reply

        answer: ClientAppCallable = trained
        for mod in reversed(self._mods):
            answer = partial(_through, mod, answer)
        return ClientReply(answer(call.message, call.context), call.context)


def _through(mod: Mod, then: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, then)


def run(  # noqa: PLR0917 - what identifies a run, in this order
    place: Place, arm: Arm, window: Window, rate: float, recordings: Path, until_s: float = HOURS_S
) -> Curve:
    """Train for some time in a window.

    Args:
        place: model and links.
        arm: how messages are made smaller.
        window: phones and hours; `window_of` makes it.
        rate: of the server.
        recordings: folder of the published files.
        until_s: length of the run in s.
    """
    app, seed, n = opened(place.app), window.seed, window.n_devices
    before_s = history_s(window)
    mods: list[Mod] = [CompressionMod()]
    if arm.forecaster:
        mod = ForecastMod()
        vars(mod)["_forecaster"] = forecaster(arm.forecaster, window.traces, recordings)
        mods.append(mod)
    grid = TraceGrid(
        window.traces,
        WithMods(app.executor(), mods) if arm.compression else app.executor(),
        costs=replace(app.costs(window.work, n, place.alpha, seed), model_bytes=place.model_bytes),
        seed=seed,
        run_config=app.config(place.alpha, seed),
        until_s=before_s + until_s,
    )
    at_s, accuracy = [], []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        now = grid.now() - before_s
        if at_s and now - at_s[-1] < EVERY_S:
            return None
        at_s.append(now)
        accuracy.append(app.evaluate(arrays, seed)[0])
        return MetricRecord({"accuracy": accuracy[-1]})

    stages = [] if arm.compression is None else [arm.compression]
    strategy = FedBuff(CONCURRENCY, BUFFER_SIZE, eta=rate, seed=seed, stages=stages)
    with grid.running(), top_k() if arm.is_sparse else nullcontext(), suppress(RunEnded):
        grid.sleep(before_s)
        strategy.start(grid, app.initial(seed), 10**6, TIMEOUT_S, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    begun = events["started_at"].to_numpy() - before_s
    spent = events[list(SPENT)].sum(axis=1).to_numpy()

    def by(instant: float, column: str) -> float:
        return float(events[column].to_numpy()[begun <= instant].sum())

    return Curve(
        at_s=[round(t, 1) for t in at_s],
        accuracy=[round(a, 5) for a in accuracy],
        device_s=[round(float(np.clip(t - begun, 0.0, spent).sum()), 1) for t in at_s],
        up_bytes=[by(t, "uploaded_bytes") for t in at_s],
        down_bytes=[by(t, "downloaded_bytes") for t in at_s],
        jobs=int((events["status"] == "reported").sum()),
        versions=int(events["aggregated_version"].max()),
    )


def history_s(window: Window) -> float:
    """Return for how long the devices of a window have been logged before it, in s."""
    return min(HISTORY_S, window.start)


@cache
def _fleet(recordings: Path, part: str) -> TraceSet:
    return fleets(recordings, DIVISION, FLEET)[part]


@cache
def windows_of(recordings: Path, part: str, links: str, seeds: tuple[int, ...]) -> list[Window]:
    """Return the phones and hours of each seed, with half a day before that.

    Args:
        recordings: folder of the published files.
        part: of the fleet, "test" or another.
        links: file of the links.
        seeds: of windows, each of another day.
    """
    fleet = _fleet(recordings, part)
    made = windows(fleet, FLEET, seeds)
    if links != "uccmisl-5g.zip":
        fleet = linked(fleet, TraceSet.read(recordings / links), DIVISION)
    return [looking_back(window, fleet) for window in made]


def looking_back(window: Window, fleet: TraceSet) -> Window:
    """Return a window whose traces begin before it, with the links of a fleet."""
    start = window.start - history_s(window)
    traces = fleet.between(start, window.start + HOURS_S).take(window.devices)
    return replace(window, traces=traces)


def linked(fleet: TraceSet, links: TraceSet, seed: int) -> TraceSet:
    """Return a fleet with other links, drawn in equal numbers, each from an instant of its own."""
    rng, n = stream(seed, _LINKS), fleet.n_devices
    drawn, turned = rng.permutation(np.arange(n) % links.n_devices), rng.random(n)
    down, up = (
        series.take(drawn).shifted(turned * series.take(drawn).record_s())
        for series in (links.channel("downlink"), links.channel("uplink"))
    )
    return replace(fleet, downlink=down, uplink=up)


def forecaster(kind: str, traces: TraceSet, recordings: Path) -> Forecaster:
    """Return what devices forecast by."""
    if kind == "oracle":
        return Oracle(traces)
    return embedded(FLEET) if kind == "lstm" else _persistence(recordings)


@cache
def _persistence(recordings: Path) -> Persistence:
    parts = {name: _fleet(recordings, name) for name in ("learn", "stop", "test")}
    learn, stop, _ = examples(parts, N_EXAMPLES, 0)
    return Persistence().fit(learn, stop, seed=0)


@contextmanager
def top_k() -> Iterator[None]:
    """Let codes of replies hold the largest elements alone, in the place of all in few bits.

    A prototype, to measure what a format of that kind is worth: as many elements as fit in the
    bytes of the format, each with its place in two bytes and its value in eight bits.
    """
    whole = records.encode

    def replies_alone(x: Array, form: FormatName, **more: Any) -> bytes:  # noqa: ANN401
        return (whole if more.get("left") is None else sparse)(x, form, **more)

    with patch.object(records, "encode", replies_alone), patch.object(validation, "decode", dense):
        yield


def sparse(
    x: Array,
    form: FormatName,
    *,
    minus: Array | None = None,
    left: Array | None = None,
    rng: np.random.Generator | None = None,
) -> bytes:
    """Return the largest elements of x, or of x - minus + left, in the bytes of a format."""
    assert x.size <= 1 << 16, "a prototype for small networks"
    del rng
    v = x.reshape(-1).astype(np.float32)
    v = v if minus is None else v - minus.reshape(-1)
    v = v if left is None else v + left.reshape(-1)
    size = n_bytes(form, x.size)
    k = (size - 4) // _SPARSE
    places = np.sort(np.argpartition(np.abs(v), x.size - k)[x.size - k :]).astype("<u2")
    scale = np.float32(np.abs(v[places]).max())
    codes = np.rint(v[places] / (scale or 1.0) * 127).astype(np.int8)
    if left is not None:
        v[places] -= codes * (scale / np.float32(127))
        left.reshape(-1)[:] = v
    return (scale.tobytes() + places.tobytes() + codes.tobytes()).ljust(size, b"\0")


def dense(data: bytes, form: FormatName, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return what `sparse` has sent."""
    n = prod(shape)
    k = (n_bytes(form, n) - 4) // _SPARSE
    made = np.zeros(n, dtype)
    places = np.frombuffer(data, "<u2", k, 4)
    codes = np.frombuffer(data, np.int8, k, 4 + 2 * k)
    made[places] = codes * (np.frombuffer(data, "<f4", 1)[0] / np.float32(127))
    return made.reshape(shape)
