"""The fit of learning constants: what it recovers, what it keeps, and what it refuses."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.agents.env.episodes import EpisodeSettings, JobKinds
from fedstale.agents.env.learning_fit import (
    FREE,
    NOTHING,
    PROXY,
    Fitted,
    LearningRun,
    fit_learning,
    folds_of,
    out_of_sample,
)
from fedstale.agents.env.learning_proxy import LearningProxy, fitted, read_proxy
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.worlds import VARIED, read_spread
from fedstale.errors import ConfigError

TRUE = replace(fitted(), eta=0.35, delta=0.4, first_loss=2.303)


def made_run(number, proxy=TRUE, *, app="made", n=24, steps=40, favoured=None, **changes):
    """A run of a proxy on data that the fit does not see; some runs pick a third of the fleet."""
    rng = np.random.default_rng((number, 5))
    mixtures = rng.dirichlet(np.full(10, 0.3), size=n)
    share = mixtures.mean(axis=0)
    pool = np.arange(n if number % 2 == 0 else n // 3)
    losses, state, merged = [proxy.first_loss], np.full((1, 10), proxy.first_loss), []
    for _ in range(steps):
        devices = rng.choice(pool, size=4, replace=False)
        ratios = mixtures[devices].mean(axis=0) / np.maximum(share, 1e-6)
        state = proxy.after_step(state, ratios[None], np.ones(1))
        losses.append(float(state.mean()))
        merged.append(devices)
    values = {
        "name": f"run {number}",
        "app": app,
        "n_devices": n,
        "versions": np.arange(steps + 1),
        "losses": np.array(losses),
        "merged": merged,
        "weights": [np.ones(4)] * steps,
        "staleness": np.zeros(steps),
        "job_s": 120.0,
        "n_bytes": 5e6,
    }
    return LearningRun(**(values | changes))


@pytest.fixture(scope="module")
def runs():
    return [made_run(number) for number in range(8)]


@pytest.fixture(scope="module")
def fit(runs):
    return fit_learning(runs, seed=0)


def test_a_fit_finds_how_fast_the_runs_learnt(fit):
    # It starts from other constants, of which eta is nearly half and delta twice as much.
    assert fitted().eta < 0.6 * TRUE.eta
    assert fit.proxy.eta == pytest.approx(TRUE.eta, rel=0.25)
    assert abs(fit.proxy.delta - TRUE.delta) < 0.5 * abs(fitted().delta - TRUE.delta)
    assert fit.spread["eta"] < read_spread()["eta"]


def test_a_fit_keeps_what_runs_do_not_tell(fit):
    for name in VARIED:
        if name not in FREE:
            assert getattr(fit.proxy, name) == getattr(fitted(), name)
            assert fit.spread[name] == read_spread()[name]


def test_a_fit_predicts_runs_that_it_was_not_fitted_to(fit):
    unseen = [made_run(number) for number in range(100, 108)]
    table = out_of_sample(unseen, replace(fit, held_out=[fit.proxy] * 5)).set_index("emulator")
    assert table.loc[PROXY, "r2"] > 0.5


def test_a_seed_repeats_a_fit():
    few = [made_run(number, steps=12) for number in range(5)]
    assert fit_learning(few, seed=0).proxy == fit_learning(few, seed=0).proxy


def test_a_fit_to_known_mixtures_needs_no_deal(runs):
    known = [
        replace(run, mixtures=np.random.default_rng((i, 5)).dirichlet(np.full(10, 0.3), size=24))
        for i, run in enumerate(runs)
    ]
    found = fit_learning(known, seed=0)
    assert found.skew is None
    assert found.proxy.eta == pytest.approx(TRUE.eta, rel=0.1)
    with pytest.raises(ConfigError, match="mixtures are known of some runs only"):
        fit_learning([*known[:4], *runs[4:]])


def test_a_fit_is_judged_on_runs_that_were_left_out(runs, fit):
    table = out_of_sample(runs, fit)
    assert set(table["emulator"]) == {PROXY, NOTHING}
    assert table.set_index("emulator")["r2"][NOTHING] == 0.0
    assert table["rmse"].is_monotonic_increasing
    parts = np.concatenate(folds_of(8, 0))
    assert sorted(parts) == list(range(8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": np.full(41, np.nan)}, "run 3: a loss of nan: expected finite numbers > 0"),
        ({"losses": np.zeros(41)}, "run 3: a loss of 0.0"),
        ({"versions": np.arange(5), "losses": np.ones(5)}, "run 3: 5 losses up to version 4"),
        ({"versions": np.arange(1, 42)}, "run 3: the first loss is that of version 1"),
    ],
)
def test_a_run_without_what_is_needed_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        made_run(3, **change)


def test_too_few_runs_and_runs_of_different_apps_are_refused(runs):
    with pytest.raises(ConfigError, match="4 runs: expected at least 5 of one app"):
        fit_learning(runs[:4])
    with pytest.raises(ConfigError, match="runs of digits and made: expected runs of one app"):
        fit_learning([*runs, made_run(9, app="digits")])


def test_a_file_of_constants_says_what_it_was_fitted_to(tmp_path, fit):
    path = tmp_path / "own.toml"
    fit.write(path, {"runs": ["a"]})
    proxy = read_proxy(path)
    assert isinstance(proxy, LearningProxy)
    assert proxy.eta == pytest.approx(fit.proxy.eta, rel=1e-5)
    assert read_spread(path) == pytest.approx(dict(fit.spread), abs=1e-4)
    assert Fitted.read(path) == fit.fitted
    assert tomllib.loads(path.read_text())["fitted"]["updates"] == [4.0, 4.0]
    with pytest.raises(ConfigError, match="cannot be written"):
        fit.write(tmp_path / "nowhere" / "own.toml", {})
    path.write_text("[fitted]\napp = 'x'\n")
    with pytest.raises(ConfigError, match=r"own\.toml: expected a table \[fitted\]"):
        Fitted.read(path)


@pytest.fixture(scope="module")
def place():
    traces = synthetic(60, days=1)
    kinds = JobKinds.of_fleet(traces, minutes=(2.0,), megabytes=(5.0,), patience=(5.0,))
    settings = EpisodeSettings(devices=(24, 24), rounds=20)
    return Scenario.of(traces, forecasts="none", settings=settings, kinds=kinds)


def episodes_with(place, **values):
    made = place.draw(10, np.random.default_rng(0))
    columns = {"buffer_size": 4, "keeps_stragglers": False, "rounds": 20} | values
    for name, value in columns.items():
        getattr(made, name)[:] = value
    return made


def test_windows_like_the_runs_of_the_fit_are_inside_of_it(place, fit):
    job_s = float(place.kinds.median_s[0])
    known = replace(fit.fitted, job_s=(job_s, job_s), devices=(10.0, 24.0))
    assert known.outside(episodes_with(place), place.kinds) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"buffer_size": 40}, "10 of 10 windows: updates of a server step 40 to 40, fitted to 4"),
        ({"buffer_size": 1}, "10 of 10 windows: updates of a server step 1 to 1, fitted to 4"),
        ({"rounds": 100}, "10 of 10 windows: rounds 100 to 100, fitted to 0 to 40"),
        ({"keeps_stragglers": True}, "10 of 10 windows: stragglers are aggregated later"),
    ],
)
def test_a_schedule_outside_of_the_fit_is_told(place, fit, values, said):
    job_s = float(place.kinds.median_s[0])
    known = replace(fit.fitted, job_s=(job_s, job_s), devices=(10.0, 24.0))
    (found,) = known.outside(episodes_with(place, **values), place.kinds)
    assert found.startswith(said)


def test_a_job_outside_of_the_fit_is_told(place, fit):
    known = replace(fit.fitted, job_s=(1.0, 2.0), devices=(10.0, 24.0), n_bytes=(1e3, 2e3))
    job, size = known.outside(episodes_with(place), place.kinds)
    assert "job on the median device" in job
    assert job.endswith("fitted to 1 to 2 s")
    assert "size of the model 5 to 5 MB" in size
