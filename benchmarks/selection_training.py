"""One real training run of `digits` with some selector, and the same hours as the proxy has them.

Thirty recorded phones that appear within four hours train the built-in app; the server asks
each for a forecast before it picks. Every merge is written down: what the model's loss was on each
digit before and after, and whose updates went in. The same phones, hours, data and schedule make
one episode of the selection environment.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, MetricRecord
from numpy_digits import NumpyDigits, forward, read_model

from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes, JobKinds
from fedstale.agents.env.forecast_table import Forecasts
from fedstale.agents.env.learning_proxy import entropy_of
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward, Simulator
from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import Selector
from fedstale.strategies.server.clients import UNKNOWN, Candidates
from fedstale.traces.arrays import Array, Index

N_DEVICES = 30
"""Of a quarter of the recorded phones, 22 to 56 appear within four hours."""
HOURS_S = 4 * 3600.0
TTL_S = 1800.0
EPOCHS, EXAMPLES, WORK = 5, 1150 / N_DEVICES, 200.0
"""Of a job: 200 units of work in all, however many examples a phone has in the mean."""
COSTS = Costs(
    work_per_example=WORK / (EPOCHS * EXAMPLES),
    epochs=EPOCHS,
    examples=EXAMPLES,
    model_bytes=5_000_000,
)
SPENT = ("download_s", "compute_s", "upload_s")


@dataclass(kw_only=True)
class Window:
    """Phones, hours and data of one seed."""

    scenario: Scenario
    devices: Index
    start: float
    task: ModuleType
    alpha: float
    seed: int
    concurrency: int = 8
    buffer_size: int = 6
    mixtures: Array = field(init=False)
    examples: Array = field(init=False)

    def __post_init__(self) -> None:
        trainer = NumpyDigits(self.task)
        dealt = [trainer.data(i, N_DEVICES, self.alpha, self.seed)[1] for i in range(N_DEVICES)]
        counts = np.stack([np.bincount(labels, minlength=GROUPS) for labels in dealt])
        self.examples = counts.sum(axis=1).astype(np.float64)
        self.mixtures = counts / self.examples[:, None]

    @classmethod
    def drawn(
        cls, scenario: Scenario, task: ModuleType, alpha: float, seed: int, buffer_size: int = 6
    ) -> "Window":
        """Return a window with phones that appear in it."""
        rng = np.random.default_rng((seed, 61))
        assert scenario.traces.availability is not None
        for _ in range(100):
            start = scenario.start + rng.random() * (scenario.end - scenario.start - HOURS_S)
            first, _ = scenario.traces.availability.window_at_or_after(scenario.devices, start)
            there = scenario.devices[first < start + HOURS_S]
            if there.size >= N_DEVICES:
                devices = rng.permutation(there)[:N_DEVICES]
                return cls(
                    scenario=scenario,
                    devices=devices,
                    start=start,
                    task=task,
                    alpha=alpha,
                    seed=seed,
                    concurrency=-(-4 * buffer_size // 3),
                    buffer_size=buffer_size,
                )
        raise ValueError(f"fewer than {N_DEVICES} phones appear in any {HOURS_S:g} s")

    def episode(self) -> Episodes:
        """Return the same window as an episode."""
        shape = (1, N_DEVICES)
        rng = np.random.default_rng((self.seed, 62))
        return Episodes(
            devices=self.devices[None],
            present=np.ones(shape, dtype=bool),
            start=np.array([self.start]),
            end=np.array([self.start + HOURS_S]),
            rounds=np.array([10_000]),
            kind=np.zeros(1, dtype=np.int64),
            concurrency=np.array([self.concurrency]),
            buffer_size=np.array([self.buffer_size]),
            keeps_stragglers=np.zeros(1, dtype=bool),
            deadline_s=np.array([np.inf]),
            age_weights=np.ones((1, AGES)),
            cooldown_s=np.zeros(1),
            requests_forecasts=np.ones(1, dtype=bool),
            over_reports=np.zeros(shape, dtype=bool),
            mixtures=self.mixtures[None],
            examples=self.examples[None],
            noise=rng.standard_normal((*shape, NOISES)),
        )


def training_kind(scenario: Scenario) -> JobKinds:
    """Return the job that training is, for the device with the mean number of examples."""
    made = JobKinds.of_fleet(scenario.traces, minutes=(1.0,), megabytes=(5.0,), patience=(1.0,))
    usual = made.median_s - made.work / _rate(made) + WORK / _rate(made)
    return JobKinds(
        work=np.array([WORK]), n_bytes=made.n_bytes, ttl_s=np.array([TTL_S]), median_s=usual
    )


def _rate(made: JobKinds) -> Array:
    return made.work / 60.0


class Told(Selector):
    """Lets another selector choose, with forecasts that devices give when asked."""

    def __init__(self, then: Selector, forecasts: Forecasts, window: Window) -> None:
        self.then, self._forecasts, self._window = then, forecasts, window

    def __deepcopy__(self, memo: dict[int, object]) -> "Told":
        # A run of a strategy copies its selector; the forecasts are large, and never change.
        return Told(self.then, self._forecasts, self._window)

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """ForecastRequest, then pick."""
        columns = {
            name: getattr(candidates, name)
            for name in UNKNOWN
            if name != "durations_s" and not name.startswith("forecast_")
        }
        who = self._window.devices[candidates.node_ids.astype(np.int64) - 1000]
        when = np.full(who.size, self._window.start + now)
        p, available, duration = self._forecasts.at(who, np.zeros(who.size, dtype=np.int64), when)
        told = Candidates.of(
            candidates.node_ids,
            candidates.situation,
            forecast_p_finish=p,
            forecast_p_available=available,
            forecast_duration_s=duration,
            forecast_at=np.where(np.isnan(p), np.nan, now),
            **columns,
        )
        return self.then.select(told, k, now, rng)


@dataclass(kw_only=True)
class Trained:
    """What a run did; one entry a version."""

    at: list[float] = field(default_factory=list)
    losses: list[Array] = field(default_factory=list)
    """Loss of the model on each digit."""
    accuracy: list[float] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    """Device-seconds that all jobs have taken until then."""
    merged: list[Index] = field(default_factory=list)
    """Devices whose updates made the version after this one."""
    reported: list[tuple[int, int, float]] = field(default_factory=list)
    """Device, version that it was sent, and loss that it reported."""
    valid_ratio: float = np.nan
    wasted_s: float = np.nan
    lost: Array = field(default_factory=lambda: np.zeros((2, 0)))
    """Instant at which each job ended whose update was never merged, and its device-seconds."""
    total_s: float = np.nan
    """Device-seconds of all jobs by the end of the hours."""


def waiting(window: Window, selector: Selector) -> StaleStrategy:
    """Return FedAvg with over-selection: the last of each round are not waited for."""
    schedule = k_sync(window.concurrency, window.buffer_size)
    return StaleStrategy(selector=selector, schedule=schedule, seed=window.seed)


def train(
    window: Window,
    selector: Selector,
    forecasts: Forecasts,
    strategy: Callable[[Window, Selector], StaleStrategy] = waiting,
) -> Trained:
    """Train for the hours of the window."""
    trained = Trained()
    test_images, test_labels = (part.numpy() for part in window.task.load_data(window.seed)[1])
    traces = window.scenario.traces.between(window.start, window.start + HOURS_S)
    config = {
        "local-epochs": 5,
        "batch-size": 8,
        "learning-rate": 0.1,
        "alpha": window.alpha,
        "seed": window.seed,
        "forecasts": False,
    }
    executor = _Recording(window.task, trained)
    grid = TraceGrid(
        traces.take(window.devices),
        executor,
        costs=COSTS,
        seed=window.seed,
        run_config=config,
        until_s=HOURS_S,
    )

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        scores = forward(read_model(arrays), test_images)[1]
        scores = scores - scores.max(axis=1, keepdims=True)
        chances = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(scores)), test_labels]
        total = np.bincount(test_labels, weights=chances, minlength=GROUPS)
        trained.at.append(grid.now())
        table = grid.events()
        spent = (np.asarray(table[name]).sum() for name in SPENT)
        trained.spent_s.append(float(sum(spent)))
        trained.losses.append(total / np.bincount(test_labels, minlength=GROUPS))
        trained.accuracy.append(float((scores.argmax(axis=1) == test_labels).mean()))
        return MetricRecord({"loss": float(chances.mean())})

    made = strategy(window, Told(selector, forecasts, window))
    initial = ArrayRecord(window.task.Network(window.seed).state_dict())
    with grid.running(), suppress(RunEnded):
        made.start(grid, initial, 10**6, TTL_S, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    for version in range(1, len(trained.at)):
        jobs = events[events["aggregated_version"] == version]
        trained.merged.append((jobs["node_id"] - 1000).to_numpy(dtype=np.int64))
    ended = events[events["status"] != "in-flight"]
    good = ended["aggregated_version"] > 0
    spent = ended[list(SPENT)].sum(axis=1)
    trained.total_s = float(events[list(SPENT)].to_numpy().sum())
    trained.lost = np.stack([ended["ended_at"][~good], spent[~good]])
    trained.valid_ratio, trained.wasted_s = float(good.mean()), float(spent[~good].sum())
    return trained


class _Recording(NumpyDigits):
    """Trains, and notes what each device reported of which version."""

    def __init__(self, task: ModuleType, trained: Trained) -> None:
        super().__init__(task)
        self._trained = trained

    def _reply(self, call):  # noqa: ANN001, ANN202 - as the class above declares it
        reply = super()._reply(call)
        device = int(call.context.node_config["partition-id"])
        version = int(call.message.content.config_records["config"]["server-round"]) - 1
        loss = float(reply.content.metric_records["metrics"]["train_loss"])
        self._trained.reported.append((device, version, loss))
        return reply


def late_progress(at: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    """Return by how much the log loss has fallen, in the mean over the second half of the hours.

    Args:
        at: instants of versions in s, from the start of the window; shape (m,).
        losses: of the model on each group; shape (m, groups).
    """
    logs = np.log(np.asarray(losses).mean(axis=1))
    looks = np.linspace(0.5, 1.0, 200) * HOURS_S
    version = np.searchsorted(np.asarray(at), looks, side="right") - 1
    return float(logs[0] - logs[np.maximum(version, 0)].mean())


def proxied(simulator: Simulator, window: Window, selector: Selector) -> tuple[float, float, float]:
    """Return what a window gives in simulation: late progress, valid ratio and reward."""
    episode = window.episode()
    simulator.reset(episode)
    rng, rows = np.random.default_rng(window.seed), np.zeros(1, dtype=np.int64)
    at, losses, merged, ended, reward = [0.0], [simulator.losses[0].copy()], 0.0, 0.0, 0.0
    while not simulator.done[0]:
        chosen = selector.select(
            simulator.candidates(0), int(simulator.slots[0]), float(simulator.now[0]), rng
        )
        picked = np.zeros((1, simulator.n), dtype=bool)
        picked[0, chosen] = True
        simulator.dispatch(rows, picked)
        made = simulator.advance(rows)
        merged += made.aggregated[0]
        ended += made.aggregated[0] + made.failed[0] + made.discarded[0]
        reward += simulator.reward_terms(rows, made, Reward())["reward"][0]
        at.append(simulator.stepped_at[0] - window.start)
        losses.append(simulator.losses[0].copy())
    return late_progress(at, losses), merged / max(ended, 1.0), reward


def examples_of(window: Window, trained: Trained) -> dict[str, npt.NDArray[np.float64]]:
    """Return what the proxy's constants are fitted to.

    Returns:
        losses (m + 1, groups), ratios (m, groups) and sizes (m,): a row for each merge;
        of_model, entropy and reported (r,): loss of the model on a device's mixture, the entropy
        of that, and what the device reported.
    """
    share = (window.examples[:, None] * window.mixtures).sum(axis=0) / window.examples.sum()
    ratios, sizes = [], []
    for devices in trained.merged:
        mass = window.examples[devices]
        mix = (mass[:, None] * window.mixtures[devices]).sum(axis=0) / mass.sum()
        ratios.append(mix / np.maximum(share, 1e-6))
        sizes.append((mass**2).sum() / mass.sum() / window.examples.mean())
    losses = np.array(trained.losses)
    who = np.array([r[0] for r in trained.reported], dtype=np.int64)
    version = np.array([r[1] for r in trained.reported], dtype=np.int64)
    return {
        "losses": losses,
        "ratios": np.array(ratios).reshape(-1, GROUPS),
        "sizes": np.array(sizes),
        "of_model": (window.mixtures[who] * losses[version]).sum(axis=1),
        "entropy": entropy_of(window.mixtures[who]),
        "reported": np.array([r[2] for r in trained.reported]),
    }
