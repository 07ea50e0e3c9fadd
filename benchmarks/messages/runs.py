"""One run of a built-in app whose messages have some format, on recorded phones and links.

Phones are those of `agent.training`: the ones that appear in some hours of a log. Their links are
5G sessions, as `lab.fleets` joins them, or the four LTE and UMTS links of mahimahi, one of them for
each phone, from an instant of its own on. Bytes are scaled to those of the model that the app's
network stands for. Replies go through `CompressionMod`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedstale.client import CompressionMod
from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.simulation.costs import WorkHook
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import Compression, FedBuff, Stage
from fedstale.traces import TraceSet
from fedstale.traces.arrays import stream
from lab.apps import opened
from lab.fleets import fleets
from lab.training import FLEETS, HOURS_S, SPENT, Window, windows

FLEET, DIVISION = "phones", 0
HISTORY_S = FLEETS[FLEET].history_s
"""For how long phones are in a window before its hours begin, as they were when formats by
forecast were compared here, too."""
CONCURRENCY, BUFFER_SIZE = 10, 5
TIMEOUT_S = 3600.0
EVERY_S = 60.0
"""Time between two evaluations, at least."""
_LINKS = 71


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which model crosses which links."""

    app: str
    model_bytes: int
    links: str
    """A file of the recordings; "uccmisl-5g.zip" are those of the fleet."""
    alpha: float | None = 0.3
    """Concentration of the deal; None for an app that deals in one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run came to; lists of one length, one entry for each evaluation."""

    at_s: list[float]
    accuracy: list[float]
    device_s: list[float]
    """What jobs had taken of all devices by then, in s."""
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


def run(
    place: Place,
    stage: Stage | None,
    window: Window,
    rate: float,
    until_s: float = HOURS_S,
    *,
    mods: Sequence[Mod] = (CompressionMod(),),
    who: Sequence[int] | None = None,
    work: WorkHook | None = None,
) -> dict[str, object]:
    """Train for some time in a window, and return the `Curve` as JSON has it.

    Args:
        place: model and links.
        stage: what makes messages smaller; None sends all in full.
        window: phones and hours; `windows_of` makes it.
        rate: of the server.
        until_s: length of the run in s.
        mods: of the devices, if there is a stage.
        who: the phones that take part, each with the data that it has among all; None for all.
        work: of a message, in the place of what the app's costs say.
    """
    app, seed, n = opened(place.app), window.seed, window.n_devices
    before_s, own = history_s(window), None if who is None else np.asarray(who)
    executor = app.executor(None if own is None else lambda i, _, job: app.data(own[i], n, job))
    costs = app.costs(window.work, n, place.alpha, seed)
    # Whole models and parts of them are replies of different sizes.
    is_constant = stage is None or isinstance(stage, Compression)
    grid = TraceGrid(
        window.traces if own is None else window.traces.take(own),
        WithMods(executor, mods) if stage else executor,
        costs=replace(costs, model_bytes=place.model_bytes, constant_replies=is_constant),
        work=work,
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

    stages = [] if stage is None else [stage]
    strategy = FedBuff(CONCURRENCY, BUFFER_SIZE, eta=rate, seed=seed, stages=stages)
    with grid.running(), suppress(RunEnded):
        grid.sleep(before_s)
        strategy.start(grid, app.initial(seed), 10**6, TIMEOUT_S, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    begun = events["started_at"].to_numpy() - before_s
    spent = events[list(SPENT)].sum(axis=1).to_numpy()

    def by(instant: float, column: str) -> float:
        return float(events[column].to_numpy()[begun <= instant].sum())

    return asdict(
        Curve(
            at_s=[round(t, 1) for t in at_s],
            accuracy=[round(a, 5) for a in accuracy],
            device_s=[round(float(np.clip(t - begun, 0.0, spent).sum()), 1) for t in at_s],
            up_bytes=[by(t, "uploaded_bytes") for t in at_s],
            down_bytes=[by(t, "downloaded_bytes") for t in at_s],
            jobs=int((events["status"] == "reported").sum()),
            versions=int(events["aggregated_version"].max()),
        )
    )


def history_s(window: Window) -> float:
    """Return for how long the devices of a window have been logged before it, in s."""
    return min(HISTORY_S, window.start)


@cache
def windows_of(recordings: Path, part: str, links: str, seeds: tuple[int, ...]) -> list[Window]:
    """Return the phones and hours of each seed, with half a day before that.

    Args:
        recordings: folder of the published files.
        part: of the fleet, "test" or another.
        links: file of the links.
        seeds: of windows, each of another day.
    """
    fleet = fleets(recordings, DIVISION, FLEET)[part]
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
