"""Fit the learning constants to runs of an app of one's own.

A run is what its folder tells: the model's loss at some versions, and whose updates went into each.
Which data a device holds is not in it. So every device gets a mixture of groups from a Dirichlet
distribution, several fleets are dealt, and the mean of their models is compared with the real one
(`LearningRun.mixtures` takes the place of the deal where it is known). The concentration of the
deal is the best of a few.

Constants are fitted by least squares with a prior: the constants and the spread that come with the
package. A curve of losses says much of how fast an app learns and little of what it forgets; what
the runs do not tell stays as it was. Four constants of what devices report, and that of the number
of examples, are not in a run's folder, and are kept. The spread of a fitted constant is that of the
fits without a part of the runs each (the delete-a-group jackknife), or what the curvature at the
fit says, whichever is larger.

The fit is of selectors' picks on given schedules. It says nothing of which schedule is better.

Reference:
    Shao, Tu. The Jackknife and Bootstrap. Springer, 1995 (delete-a-group jackknife).
"""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

from fedstale.agents.env.episodes import GROUPS, Episodes, JobKinds
from fedstale.agents.env.learning_proxy import LearningProxy, fitted
from fedstale.agents.env.worlds import Spread, read_spread
from fedstale.errors import ConfigError
from fedstale.traces.arrays import Array, Index, stream

LEAST_RUNS = 5
"""Fewer runs leave nothing to hold out."""
LEAST_LOSSES = 8
"""Losses that a run has at least."""
FOLDS = 5
AHEAD = 6
"""Server steps that predictions look ahead."""
PROXY, NOTHING = "learning proxy", "mean of the other runs"
"""What predicts runs that were left out; see `out_of_sample`."""
FREE = ("eta", "delta", "rho", "fade", "ceiling")
"""Constants that a run's folder tells of."""
SKEWS = (0.1, 0.3, 1.0, 3.0)
"""Concentrations of the deal that are tried."""

Range = tuple[float, float]
FACTOR = 2.0
"""From 1 / FACTOR of the least to FACTOR times the most of a fit is taken for known."""

_FLEETS, _LOOKS, _STEPS = 4, 30, 400
# Errors of the log loss along a run hang together: they count as three, each of this size.
_ERROR, _INDEPENDENT = 0.15, 3.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LearningRun:
    """What one run tells of how its app learns."""

    name: str
    """Of its folder, for messages."""
    app: str
    """What was trained."""
    n_devices: int
    """Devices of the fleet."""
    versions: Index
    """Versions at which the loss was measured, rising, the first 0; shape (m,)."""
    losses: Array
    """The model's loss at them, > 0; shape (m,)."""
    merged: Sequence[Index]
    """Positions of the devices whose updates went into each version after the first."""
    weights: Sequence[Array]
    """Weight of each of these updates by its staleness; 1 without any."""
    staleness: Array
    """Mean staleness of the updates of each version; shape (versions,)."""
    job_s: float
    """Median time from sending a job to its last byte, in s."""
    n_bytes: float
    """Bytes of the model, each way."""
    mixtures: Array | None = None
    """Share of each group in a device's data, if known; shape (devices, groups)."""
    examples: Array | None = None
    """Examples of each device, if known; shape (devices,)."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.losses).all() or not (self.losses > 0).all():
            bad = self.losses[~(np.isfinite(self.losses) & (self.losses > 0))][0]
            raise ConfigError(f"{self.name}: a loss of {bad}: expected finite numbers > 0")
        if self.losses.size < LEAST_LOSSES or self.versions[-1] < 2 * AHEAD:
            raise ConfigError(
                f"{self.name}: {self.losses.size} losses up to version {self.versions[-1]}: "
                f"expected at least {LEAST_LOSSES}, up to version {2 * AHEAD} or later; run longer"
            )
        if self.versions[0] != 0:
            raise ConfigError(
                f"{self.name}: the first loss is that of version {self.versions[0]}: expected the "
                "untrained model's, version 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The runs of a fit, and which windows lie outside of it; pairs are (least, most) over runs.

    Constants that were fitted to server steps of three updates say little of steps of three
    hundred. What differs is said in sentences and stops nothing: whoever plays them decides.
    """

    app: str
    """What was trained."""
    runs: int
    """How many."""
    updates: Range
    """Updates of a server step, mean of a run."""
    staleness: Range
    """Staleness of an update, mean of a run."""
    devices: Range
    """Devices of the fleet."""
    steps: Range
    """Server steps."""
    job_s: Range
    """Time of a job from sending to its last byte, median of a run, in s."""
    n_bytes: Range
    """Bytes of the model, each way."""

    @classmethod
    def of(cls, runs: Sequence[LearningRun]) -> "Fitted":
        """Return what some runs were."""

        def span(values: Sequence[float]) -> Range:
            return float(f"{min(values):.6g}"), float(f"{max(values):.6g}")

        return cls(
            app=runs[0].app,
            runs=len(runs),
            updates=span([float(np.mean([len(m) for m in run.merged])) for run in runs]),
            staleness=span([float(np.mean(run.staleness)) for run in runs]),
            devices=span([run.n_devices for run in runs]),
            steps=span([len(run.merged) for run in runs]),
            job_s=span([run.job_s for run in runs]),
            n_bytes=span([run.n_bytes for run in runs]),
        )

    @classmethod
    def read(cls, path: str | Path) -> "Fitted | None":
        """Return what the constants of a file were fitted to; None if it does not say.

        Raises:
            ConfigError: what it says is not what a fit writes.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("fitted")
            if table is None:
                return None
            pairs = {
                f.name: (float(table[f.name][0]), float(table[f.name][1]))
                for f in fields(cls)
                if f.name not in {"app", "runs"}
            }
            return cls(app=str(table["app"]), runs=int(table["runs"]), **pairs)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as problem:
            raise ConfigError(
                f"{path}: expected a table [fitted] as `fedstale agent fit-learning` writes it: "
                f"{problem!r}"
            ) from None

    def table(self) -> dict[str, Any]:
        """Return the table that `read` reads."""
        made = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in made.items()}

    def outside(self, episodes: Episodes, kinds: JobKinds) -> list[str]:
        """Return what of some windows the constants were not fitted to, in sentences.

        Args:
            episodes: windows that are to be played.
            kinds: their jobs.
        """
        values: dict[str, tuple[Array | Index, Range, str]] = {
            "updates of a server step": (episodes.buffer_size, self.updates, ""),
            "devices": (episodes.present.sum(axis=1), self.devices, ""),
            "job on the median device": (kinds.median_s[episodes.kind], self.job_s, " s"),
            "size of the model": (kinds.n_bytes[episodes.kind] / 1e6, _mega(self.n_bytes), " MB"),
            "rounds": (episodes.rounds, (0.0, self.steps[1]), ""),
        }
        found = []
        for name, (have, (least, most), unit) in values.items():
            outside = (have < least / FACTOR) | (have > most * FACTOR)
            if outside.any():
                found.append(
                    f"{outside.sum()} of {len(episodes)} windows: {name} "
                    f"{have[outside].min():g} to {have[outside].max():g}{unit}, fitted to "
                    f"{least:g} to {most:g}{unit}"
                )
        keeps = episodes.keeps_stragglers
        if self.staleness[1] == 0 and keeps.any():
            found.append(
                f"{keeps.sum()} of {len(episodes)} windows: stragglers are aggregated later, "
                "fitted to current updates alone"
            )
        return found


def _mega(pair: Range) -> Range:
    return pair[0] / 1e6, pair[1] / 1e6


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LearningFit:
    """Constants that were fitted to runs; see `fit_learning`."""

    proxy: LearningProxy
    """The constants."""
    spread: Spread
    """Standard deviation of the logarithm of each; see `Worlds`."""
    skew: float | None
    """Concentration of the deal; None where mixtures were known."""
    fitted: Fitted
    """What runs they were fitted to."""
    held_out: Sequence[LearningProxy]
    """Constants that were fitted without each part of the runs, for `folds_of`."""

    def write(self, path: str | Path, provenance: dict[str, Any]) -> None:
        """Write a file of constants, which training and evaluation of agents accept."""
        constants = {name: float(f"{value:.6g}") for name, value in asdict(self.proxy).items()}
        table: dict[str, Any] = {
            "constants": constants,
            "spread": {name: round(value, 4) for name, value in self.spread.items()},
            "fitted": self.fitted.table(),
            "provenance": provenance,
        }
        try:
            Path(path).write_text(tomli_w.dumps(table), encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def fit_learning(
    runs: Sequence[LearningRun],
    *,
    prior: LearningProxy | None = None,
    spread: Spread | None = None,
    seed: int = 0,
) -> LearningFit:
    """Return the constants that explain runs best.

    Args:
        runs: of one app, at least 5.
        prior: the constants to start from; those that come with the package if None.
        spread: of the prior; that which comes with the package if None.
        seed: of the deals, and of which runs are left out together.

    Raises:
        ConfigError: there are too few runs, or they are of different apps.
    """
    checked(runs)
    prior, spread = prior or fitted(), read_spread() if spread is None else spread
    first = float(np.median([run.losses[0] for run in runs]))
    # The ceiling is in units of the first loss; whatever its size, the rest stays.
    scale = first / prior.first_loss
    start = replace(prior, first_loss=first, ceiling=prior.ceiling * scale)
    known = runs[0].mixtures is not None
    every = np.arange(len(runs))
    best: _Found | None = None
    for skew in (None,) if known else SKEWS:
        curves = Curves(runs, skew, seed=seed)
        found = _Found.of(curves, every, start, spread)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    parts = folds_of(len(runs), seed)
    left_out = [_Found.of(best.curves, np.setdiff1d(every, part), start, spread) for part in parts]
    logs = np.array([[np.log(getattr(one.proxy, name)) for name in FREE] for one in left_out])
    k = len(parts)
    jackknife = np.sqrt((k - 1) / k * ((logs - logs.mean(axis=0)) ** 2).sum(axis=0))
    widths = dict(zip(FREE, np.maximum(jackknife, best.errors).tolist(), strict=True))
    return LearningFit(
        proxy=best.proxy,
        # What the runs say nothing of is as uncertain as it was.
        spread={name: min(widths.get(name, value), 2.0) for name, value in spread.items()},
        skew=best.curves.skew,
        fitted=Fitted.of(runs),
        held_out=[one.proxy for one in left_out],
    )


def checked(runs: Sequence[LearningRun]) -> None:
    """Raise if runs cannot be fitted together.

    Raises:
        ConfigError: there are too few, of different apps, or only some with known mixtures.
    """
    if len(runs) < LEAST_RUNS:
        raise ConfigError(
            f"{len(runs)} runs: expected at least {LEAST_RUNS} of one app, with other seeds, "
            "devices or selectors"
        )
    if len(apps := sorted({run.app for run in runs})) > 1:
        raise ConfigError(f"runs of {' and '.join(apps)}: expected runs of one app")
    if len({run.mixtures is None for run in runs}) > 1:
        raise ConfigError("mixtures are known of some runs only: expected of all, or of none")


def folds_of(n: int, seed: int) -> list[Index]:
    """Return the runs that are held out together, part by part."""
    order = stream(seed, 74).permutation(n)
    return [np.sort(order[part :: min(FOLDS, n)]) for part in range(min(FOLDS, n))]


def out_of_sample(runs: Sequence[LearningRun], fit: LearningFit, *, seed: int = 0) -> pd.DataFrame:
    """Return how well a fit predicts runs that it was not fitted to, and how well their mean does.

    Runs are judged whole and not row by row: rows of one run hang together, and a row's neighbours
    would give it away.

    Args:
        runs: those of the fit.
        fit: with the constants of each part that was left out.
        seed: the fit's.

    Returns:
        A row for each of `PROXY` and `NOTHING`, the better first: emulator, rmse (of the change of
        the log loss over 6 server steps or more) and r2 (share of the variance around the other
        runs' mean).
    """
    curves = Curves(runs, fit.skew, seed=seed)
    spans = [spans_of(run, curves.steps) for run in runs]
    logs = [np.log(run.losses) for run in runs]
    changes = [own[last] - own[first] for own, (first, last) in zip(logs, spans, strict=True)]
    errors: dict[str, list[Array]] = {PROXY: [], NOTHING: []}
    for part, proxy in zip(folds_of(len(runs), seed), fit.held_out, strict=True):
        others = np.setdiff1d(np.arange(len(runs)), part)
        mean = np.concatenate([changes[i] for i in others]).mean()
        for i in part:
            errors[PROXY].append(curves.ahead(proxy, int(i), *spans[i]) - changes[i])
            errors[NOTHING].append(mean - changes[i])
    squares = {name: float((np.concatenate(found) ** 2).mean()) for name, found in errors.items()}
    rows = [
        {
            "emulator": name,
            "rmse": float(np.sqrt(square)),
            "r2": 1.0 - square / squares[NOTHING] if squares[NOTHING] > 0 else np.nan,
        }
        for name, square in squares.items()
    ]
    return pd.DataFrame(rows).sort_values("rmse", ignore_index=True)


def spans_of(run: LearningRun, steps: int) -> tuple[Index, Index]:
    """Return between which losses of a run changes are predicted, `AHEAD` server steps or more.

    Args:
        run: whose losses they are.
        steps: later losses are left out.

    Returns:
        Positions of the first and of the last losses; shape (spans,) each.
    """
    starts, ends, place = [], [], 0
    measured = run.versions[run.versions <= steps]
    while place < measured.size:
        end = int(np.searchsorted(measured, measured[place] + AHEAD))
        if end >= measured.size:
            break
        starts.append(place)
        ends.append(end)
        place = end
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


class Curves:
    """The losses of runs as a proxy has them, computed for all of them at once.

    Args:
        runs: whose updates are aggregated.
        skew: concentration of the deal; None where mixtures are known.
        seed: of the deal.
    """

    def __init__(self, runs: Sequence[LearningRun], skew: float | None, *, seed: int) -> None:
        self.runs, self.skew = runs, skew
        fleets = _FLEETS if skew is not None else 1
        self.steps = min(max(int(run.versions[-1]) for run in runs), _STEPS)
        groups = GROUPS if skew is not None else _mixtures(runs[0]).shape[1]
        shape = (self.steps, len(runs), fleets, groups)
        # A run that has ended learns nothing more.
        self.ratios, self.sizes = np.zeros(shape), np.ones(shape[:3])
        self.is_running = np.zeros((self.steps, len(runs)), dtype=bool)
        for i, run in enumerate(runs):
            for fleet in range(fleets):
                rng = stream(seed, 75, i, fleet)
                dealt = (
                    rng.dirichlet(np.full(groups, skew), size=run.n_devices)
                    if skew is not None
                    else _mixtures(run)
                )
                examples = np.ones(run.n_devices) if run.examples is None else run.examples
                n = min(len(run.merged), self.steps)
                self.is_running[:n, i] = True
                share = (examples[:, None] * dealt).sum(axis=0) / examples.sum()
                for step in range(n):
                    devices, weights = run.merged[step], run.weights[step]
                    mass = weights * examples[devices]
                    whole = max(float(examples[devices].sum()), 1e-12)
                    mix = (mass[:, None] * dealt[devices]).sum(axis=0) / whole
                    self.ratios[step, i, fleet] = mix / np.maximum(share, 1e-6)
                    size = (mass * examples[devices]).sum() / max(float(mass.sum()), 1e-12)
                    self.sizes[step, i, fleet] = size / examples.mean()
        self.looks = [self._looks(run) for run in runs]

    def _looks(self, run: LearningRun) -> Index:
        """Return which of a run's losses are compared; the first is known."""
        later = np.flatnonzero((run.versions > 0) & (run.versions <= self.steps))
        return later[np.unique(np.linspace(0, later.size - 1, _LOOKS).astype(np.int64))]

    def states(self, proxy: LearningProxy, which: Index) -> Array:
        """Return the losses on each group; shape (steps + 1, runs of which, fleets, groups)."""
        _, _, fleets, groups = self.ratios.shape
        made = np.empty((self.steps + 1, which.size, fleets, groups))
        made[0] = proxy.first_loss
        for step in range(self.steps):
            before = made[step].reshape(-1, groups)
            ratios, sizes = self.ratios[step, which], self.sizes[step, which]
            after = proxy.after_step(before, ratios.reshape(-1, groups), sizes.ravel())
            running = self.is_running[step, which][:, None, None]
            made[step + 1] = np.where(running, after.reshape(made[step].shape), made[step])
        return made

    def errors(self, proxy: LearningProxy, which: Index) -> Array:
        """Return the errors of the log loss, in units of what is expected of a good fit."""
        logs = np.log(self.states(proxy, which).mean(axis=(2, 3)))
        found = []
        for place, i in enumerate(which):
            run, looks = self.runs[i], self.looks[i]
            # How much a run has learnt is compared, whatever its first model was like.
            real = np.log(run.losses[looks] / run.losses[0])
            made = logs[run.versions[looks], place] - logs[0, place]
            found.append((made - real) / _ERROR * np.sqrt(_INDEPENDENT / looks.size))
        return np.concatenate(found)

    def ahead(self, proxy: LearningProxy, i: int, starts: Index, ends: Index) -> Array:
        """Return by how much the log loss of a run changes between versions, as a proxy has it.

        Args:
            proxy: how it learns.
            i: the run.
            starts: versions at which the loss is known, as positions in `LearningRun.versions`.
            ends: later ones.
        """
        run = self.runs[i]
        states = self.states(proxy, np.array([i]))[:, 0]
        found = np.empty(starts.size)
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            state = states[run.versions[start]]
            # The loss is known at the start, that on each group is not.
            state = state * (run.losses[start] / run.losses[0] * proxy.first_loss / state.mean())
            before = state.mean()
            for step in range(int(run.versions[start]), int(run.versions[end])):
                state = proxy.after_step(state, self.ratios[step, i], self.sizes[step, i])
            found[place] = np.log(state.mean() / before)
        return found


def _mixtures(run: LearningRun) -> Array:
    assert run.mixtures is not None
    return run.mixtures


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Found:
    """A fit to some runs."""

    proxy: LearningProxy
    cost: float
    errors: Array
    """Standard deviation of the logarithm of each of `FREE` by the curvature."""
    curves: Curves

    @classmethod
    def of(cls, curves: Curves, which: Index, start: LearningProxy, spread: Spread) -> "_Found":
        from scipy.optimize import least_squares  # noqa: PLC0415 - as in `world_evaluation`

        widths = np.array([max(spread[name], 1e-3) for name in FREE])
        median = np.array([getattr(start, name) for name in FREE])

        def proxy_of(z: Array) -> LearningProxy:
            values = dict(zip(FREE, (median * np.exp(widths * z)).tolist(), strict=True))
            # A ceiling below the first loss would be no constant of a proxy.
            values["ceiling"] = max(values["ceiling"], start.first_loss)
            return replace(start, **values)

        def error(z: Array) -> Array:
            off = curves.errors(proxy_of(z), which)
            # A run that no constants explain counts by its size, not by its square.
            soft = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
            return np.concatenate([soft, z])

        found = least_squares(
            error, np.zeros(len(FREE)), bounds=(-3.0, 3.0), diff_step=1e-3, max_nfev=30
        )
        covariance = np.linalg.inv(found.jac.T @ found.jac)
        return cls(
            proxy=proxy_of(found.x),
            cost=float(found.cost),
            errors=widths * np.sqrt(np.diag(covariance)),
            curves=curves,
        )
