"""Does the learning proxy rank selectors as real training does? And the fit of its constants.

The constants are fitted by least squares to runs of the built-in app `digits` under `TraceGrid`
(`selection_training`): to the change of the log loss on each digit over six merges, and to what
devices report. Then selectors train other windows, phones and deals, for real and in the proxy's
simulator, and their rankings are compared by Spearman's coefficient.

Run it with: python benchmarks/selection_proxy.py RECORDINGS [--quick] [--write]
"""

import argparse
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w
from numpy.typing import NDArray
from recorded_scenarios import recorded_scenarios
from results_file import write_result
from scipy.optimize import least_squares
from scipy.stats import spearmanr
from selection_training import HOURS_S, Trained, Window, appearing, train, training_kinds
from threadpoolctl import threadpool_limits
from training_apps import Digits, Fashion, opened

from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes
from fedstale.agents.env.forecast_table import Forecasts, ForecastTable, NoForecasts, TrueForecasts
from fedstale.agents.env.learning_proxy import LearningProxy, entropy_of
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward, Simulator
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import (
    RELEASED,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.strategies.types import Candidates
from fedstale.traces.arrays import Array
from fedstale.traces.forecast import embedded

CONSTANTS = Path(__file__).parent.parent / "agents" / "env" / "learning_proxy.toml"
ALPHAS = (0.1, 0.3, 1.0)
FIT_SEEDS, TEST_SEEDS = range(201, 204), range(1, 7)
FIT_SIZES = (2, 6, 12)
"""Merge sizes of the runs that constants are fitted to; the comparison has 3, of 4 jobs."""
AHEAD = 6
"""Merges that the fit looks ahead."""
Run = dict[str, NDArray[np.float64]]
FIT_SELECTORS = ("random", "fastest", "power of choice")


N_DEVICES = 40
"""Of the tested quarter of the phones, about as many appear within four hours."""


@dataclass(kw_only=True)
class Deal:
    """A window, the groups of data that its phones hold, and the size of a merge."""

    window: Window
    alpha: float
    buffer_size: int = 3
    app: str = "digits"
    mixtures: Array = field(init=False)
    examples: Array = field(init=False)

    def __post_init__(self) -> None:
        app = opened(self.app)
        assert isinstance(app, Digits | Fashion)
        dealt = app.labels(N_DEVICES, self.alpha, self.window.seed)
        counts = np.stack([np.bincount(labels, minlength=GROUPS) for labels in dealt])
        self.examples = counts.sum(axis=1).astype(np.float64)
        self.mixtures = counts / self.examples[:, None]

    @classmethod
    def drawn(
        cls,
        scenario: Scenario,
        alpha: float,
        seed: int,
        buffer_size: int = 3,
        *,
        app: str = "digits",
    ) -> "Deal":
        """Return a window with phones that appear in it."""
        rng = np.random.default_rng((seed, 61))
        for _ in range(100):
            start = scenario.start + rng.random() * (scenario.end - scenario.start - HOURS_S)
            there = appearing(scenario.traces, scenario.devices, start)
            if there.size >= N_DEVICES:
                devices = rng.permutation(there)[:N_DEVICES]
                work = float(scenario.kinds.work[0])
                window = Window.of(scenario.traces, devices, start, seed, work=work)
                return cls(window=window, alpha=alpha, buffer_size=buffer_size, app=app)
        raise ValueError(f"fewer than {N_DEVICES} phones appear in any {HOURS_S:g} s")

    @property
    def concurrency(self) -> int:
        """Jobs in flight: a quarter of them are not waited for."""
        return -(-4 * self.buffer_size // 3)

    def train(self, selector: Selector, forecasts: Forecasts) -> Trained:
        """Train for real: FedAvg with over-selection."""

        def strategy(selector: Selector, seed: int) -> StaleStrategy:
            schedule = k_sync(self.concurrency, self.buffer_size)
            return StaleStrategy(selector=selector, schedule=schedule, seed=seed)

        return train(
            self.window,
            opened(self.app),
            self.alpha,
            selector,
            forecasts=forecasts,
            strategy=strategy,
        )

    def episode(self) -> Episodes:
        """Return the same window as an episode."""
        shape, window = (1, N_DEVICES), self.window
        rng = np.random.default_rng((window.seed, 62))
        return Episodes(
            devices=window.devices[None],
            present=np.ones(shape, dtype=bool),
            start=np.array([window.start]),
            end=np.array([window.start + HOURS_S]),
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
            inflates=np.zeros(shape, dtype=bool),
            mixtures=self.mixtures[None],
            examples=self.examples[None],
            noise=rng.standard_normal((*shape, NOISES)),
        )


class Useful(Selector):
    """The most useful, whether they finish or not."""

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Pick by the utility alone, those never heard first."""
        utility = np.nan_to_num(candidates.utility, nan=np.inf)
        order = np.lexsort((rng.random(len(candidates)), -utility))
        return [int(node) for node in candidates.node_ids[order[:k]]]


# What devices say: "table" their forecast, "truth" the future, "nothing" nothing.
SELECTORS: dict[str, tuple[Callable[[], Selector], str]] = {
    "random": (Random, "table"),
    "fastest": (Fastest, "table"),
    "power of choice": (lambda: PowerOfChoice(16), "table"),
    "least available": (LeastAvailable, "table"),
    "oort, paper": (Oort, "table"),
    "oort, released": (lambda: Oort(RELEASED), "table"),
    "likely": (MostReliable, "table"),
    "useful": (Useful, "table"),
    "likely and useful": (ExpectedUtility, "table"),
    "likely and useful, no forecasts": (ExpectedUtility, "nothing"),
    "likely and useful, oracle": (ExpectedUtility, "truth"),
}


def fitted(runs: list[Run]) -> tuple[LearningProxy, dict[str, float]]:
    """Return the proxy that explains some runs best, and how well it does.

    The proxy starts from the real losses at every sixth merge and is compared with them six merges
    later, on each digit and in the mean: what holds from one merge to the next only is noise to a
    choice of devices. Losses below 0.02 count as 0.02: there the few dozen test images of a digit
    say nothing.
    """
    first = float(np.mean([run["losses"][0].mean() for run in runs]))
    names = ("eta", "delta", "nu", "rho", "fade", "ceiling")

    def proxy_of(x: NDArray[np.float64]) -> LearningProxy:
        return LearningProxy(first_loss=first, **dict(zip(names, x.tolist(), strict=True)))

    def error(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([ahead(proxy_of(x), run) for run in runs])

    found = least_squares(
        error,
        x0=[0.2, 0.5, 0.5, 0.1, 2.0, 5.0],
        bounds=([1e-3, 0.0, 0.0, 0.0, 0.0, 1.1 * first], [5.0, 3.0, 3.0, 5.0, 20.0, 12.0]),
        loss="soft_l1",
        f_scale=0.5,
    )
    data = {k: np.concatenate([run[k] for run in runs]) for k in ("of_model", "entropy")}
    reported = np.log(np.maximum(np.concatenate([run["reported"] for run in runs]), 1e-6))
    known = np.stack(
        [np.log(np.maximum(data["of_model"], 1e-4)), data["entropy"], np.ones(reported.size)],
        axis=1,
    )
    (power, mixed, scale), *_ = np.linalg.lstsq(known, reported, rcond=None)
    left = reported - known @ [power, mixed, scale]
    constants = dict(zip(names, found.x.tolist(), strict=True)) | {
        "first_loss": first,
        "loss_scale": float(np.exp(scale)),
        "loss_power": float(power),
        "loss_mixed": float(mixed),
        "loss_noise": float(left.std()),
    }
    proxy = LearningProxy(**{name: round(value, 4) for name, value in constants.items()})
    return proxy, {
        "runs": len(runs),
        "merges": sum(len(run["sizes"]) for run in runs),
        "spearman_of_runs": round(float(spearmanr([ends(proxy, r) for r in runs])[0]), 3),
        "r2_of_log_report": round(float(1 - left.var() / reported.var()), 3),
    }


def ahead(proxy: LearningProxy, run: Run) -> NDArray[np.float64]:
    """Return the errors of a proxy's log losses, six merges ahead."""
    real, n = run["losses"], len(run["sizes"])
    start = np.arange(0, n - AHEAD + 1, AHEAD)
    losses = real[start]
    for step in range(AHEAD):
        losses = proxy.after_step(losses, run["ratios"][start + step], run["sizes"][start + step])
    true = np.maximum(real[start + AHEAD], 0.02)
    each = np.log(np.maximum(losses, 0.02)) - np.log(true)
    # The mean is what counts, and one number against ten.
    mean = 3.0 * (np.log(losses.mean(axis=1)) - np.log(true.mean(axis=1)))
    return np.concatenate([each.ravel(), mean])


def ends(proxy: LearningProxy, run: Run) -> tuple[float, float]:
    """Return the log loss over the second half of a run, real and as the proxy has it."""
    losses = [run["losses"][:1]]
    for ratios, size in zip(run["ratios"], run["sizes"], strict=True):
        losses.append(proxy.after_step(losses[-1], ratios[None], np.array([size])))
    half = len(losses) // 2
    made = np.concatenate(losses)[half:]
    return tuple(float(np.log(x.mean(axis=1)).mean()) for x in (run["losses"][half:], made))  # type: ignore[return-value]


def compared(
    deals: list[Deal], proxy: LearningProxy, said: dict[str, Forecasts], scenario: Scenario
) -> list[dict[str, Any]]:
    """Return what each selector reaches, for real and in simulation; means over windows."""
    rows = []
    for name, (make, told) in SELECTORS.items():
        played = replace(scenario, forecasts=said[told], proxy=proxy)
        simulator = played.with_devices(N_DEVICES).simulator(1)
        found = []
        for deal in deals:
            run = deal.train(make(), said[told])
            last = len(run.accuracy) // 4 + 1
            found.append(
                (
                    late_progress(run.at, run.losses),
                    float(np.mean(run.accuracy[-last:])),
                    run.valid_ratio,
                    *proxied(simulator, deal, make()),
                )
            )
        columns = ("real_progress", "real_accuracy", "real_valid_ratio")
        columns += ("proxy_progress", "proxy_valid_ratio", "proxy_reward")
        means = np.mean(found, axis=0).round(4).tolist()
        alpha = deals[0].alpha
        rows.append(
            {"selector": name, "alpha": alpha, "windows": len(deals)}
            | dict(zip(columns, means, strict=True))
        )
        print(rows[-1], flush=True)
    return rows


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


def proxied(simulator: Simulator, deal: Deal, selector: Selector) -> tuple[float, float, float]:
    """Return what a window gives in simulation: late progress, valid ratio and reward."""
    window = deal.window
    simulator.reset(deal.episode())
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


def examples_of(deal: Deal, trained: Trained) -> dict[str, npt.NDArray[np.float64]]:
    """Return what the proxy's constants are fitted to.

    Returns:
        losses (m + 1, groups), ratios (m, groups) and sizes (m,): a row for each merge;
        of_model, entropy and reported (r,): loss of the model on a device's mixture, the entropy
        of that, and what the device reported.
    """
    share = (deal.examples[:, None] * deal.mixtures).sum(axis=0) / deal.examples.sum()
    ratios, sizes = [], []
    for devices in trained.merged:
        mass = deal.examples[devices]
        mix = (mass[:, None] * deal.mixtures[devices]).sum(axis=0) / mass.sum()
        ratios.append(mix / np.maximum(share, 1e-6))
        sizes.append((mass**2).sum() / mass.sum() / deal.examples.mean())
    losses = _each_version(np.array(trained.losses), len(trained.merged), opened(deal.app).every)
    who = np.array([r[0] for r in trained.reported], dtype=np.int64)
    version = np.array([r[1] for r in trained.reported], dtype=np.int64)
    return {
        "losses": losses,
        "ratios": np.array(ratios).reshape(-1, GROUPS),
        "sizes": np.array(sizes),
        "of_model": (deal.mixtures[who] * losses[version]).sum(axis=1),
        "entropy": entropy_of(deal.mixtures[who]),
        "reported": np.array([r[2] for r in trained.reported]),
    }


def _each_version(losses: Array, n: int, every: int) -> Array:
    """Return the losses of all n + 1 versions, in between where not each was evaluated."""
    if every == 1:
        return losses
    measured, versions = every * np.arange(len(losses)), np.arange(n + 1)
    logs = np.log(np.maximum(losses, 1e-9)).T
    return np.exp(np.stack([np.interp(versions, measured, group) for group in logs], axis=1))


def ranges(trained: list[Trained]) -> dict[str, Any]:
    """Return what the constants were fitted to, as `Fitted` reads it; (least, most) over runs."""

    def span(values: list[float]) -> list[float]:
        return [round(float(min(values)), 1), round(float(max(values)), 1)]

    return {
        "app": "digits",
        "runs": len(trained),
        "updates": span([float(np.mean([len(each) for each in run.merged])) for run in trained]),
        # FedAvg: every update is of the version before.
        "staleness": [0.0, 0.0],
        "devices": [float(N_DEVICES), float(N_DEVICES)],
        "steps": span([len(run.merged) for run in trained]),
        "job_s": span([float(np.median(run.spent_s[run.used])) for run in trained]),
        "n_bytes": [float(Digits.model_bytes), float(Digits.model_bytes)],
    }


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Spearman's coefficients over the selectors of one table."""
    found = {
        f"spearman {real} {made}": round(
            float(spearmanr([row[real] for row in rows], [row[made] for row in rows])[0]), 3
        )
        for real in ("real_progress", "real_accuracy")
        for made in ("proxy_progress", "proxy_reward")
    }
    return {"selectors": len(rows), **found}


def _over_alphas(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each selector's rows."""
    made = []
    for name in SELECTORS:
        own = [row for row in rows if row["selector"] == name]
        columns = [c for c in own[0] if c not in {"selector", "alpha", "windows"}]
        means = {c: round(float(np.mean([row[c] for row in own])), 4) for c in columns}
        windows = sum(row["windows"] for row in own)
        made.append({"selector": name, "alpha": "all", "windows": windows, **means})
    return made


def main() -> None:
    """Fit, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="few seeds, one concentration")
    parser.add_argument("--write", action="store_true", help="write the constants to agents/env/")
    parser.add_argument("--cache", type=Path, help="folder to keep forecasts in")
    options = parser.parse_args()
    fit_seeds, test_seeds = (
        (FIT_SEEDS[:1], TEST_SEEDS[:2]) if options.quick else (FIT_SEEDS, TEST_SEEDS)
    )
    scenarios = recorded_scenarios(options.recordings, forecasts="none")
    kinds = training_kinds(scenarios.training.traces, (opened("digits").model_bytes,))
    # The constants come from the phones that agents learn on; the test is on phones of its own.
    both = {
        name: Scenario.of(
            scenario.traces,
            forecasts="none",
            devices=np.arange(scenario.traces.n_devices),
            start=12 * 3600.0,
            end=44 * 3600.0,
            kinds=kinds,
        )
        for name, scenario in (("fit", scenarios.training), ("test", scenarios.testing))
    }
    rows: list[dict[str, Any]] = []
    with threadpool_limits(1):
        runs, trained = [], []
        for alpha in ALPHAS:
            for seed in fit_seeds:
                for size in FIT_SIZES:
                    deal = Deal.drawn(both["fit"], alpha, seed, size)
                    for name in FIT_SELECTORS:
                        run = deal.train(SELECTORS[name][0](), NoForecasts())
                        if len(run.merged) >= AHEAD:
                            runs.append(examples_of(deal, run))
                            trained.append(run)
        proxy, quality = fitted(runs)
        print(proxy, quality, flush=True)
        test = both["test"]
        table = ForecastTable.of(
            test.traces,
            kinds,
            [(test.devices, embedded())],
            start=test.start,
            end=test.end,
            cache=None if options.cache is None else options.cache / "proxy.npz",
        )
        said: dict[str, Forecasts] = {
            "table": table,
            "truth": TrueForecasts(test.traces, kinds),
            "nothing": NoForecasts(),
        }
        for alpha in ALPHAS[1:2] if options.quick else ALPHAS:
            deals = [Deal.drawn(test, alpha, seed) for seed in test_seeds]
            found = compared(deals, proxy, said, test)
            rows += found
            rows.append({"selector": "agreement", "alpha": alpha, **agreement(found)})
            print(rows[-1], flush=True)
        pooled = _over_alphas(rows)
        rows += [*pooled, {"selector": "agreement", "alpha": "all", **agreement(pooled)}]
        print(rows[-1], flush=True)
    rows.append({"selector": "fit", **quality})
    command = "python benchmarks/selection_proxy.py RECORDINGS" + " --quick" * options.quick
    print(
        write_result(
            "selection_proxy-quick" if options.quick else "selection_proxy", rows, command=command
        )
    )
    if options.write:
        constants = {name: float(getattr(proxy, name)) for name in LearningProxy.__slots__}
        provenance = {
            "app": "digits, trained under TraceGrid",
            "recordings": "FLASH by days, AI Benchmark, PlanetLab, 5G production dataset",
            "command": f"{command} --write",
            **quality,
        }
        # The spread stays as it is until it is measured again, by agent_worlds.py.
        table = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))
        table |= {"constants": constants, "fitted": ranges(trained), "provenance": provenance}
        CONSTANTS.write_text(tomli_w.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main()
