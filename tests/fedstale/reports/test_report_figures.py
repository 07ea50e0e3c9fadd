import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import write_run

from fedstale.errors import ConfigError
from fedstale.reports import costs, devices, learning
from fedstale.reports.page import lead
from fedstale.reports.run import Run


@pytest.fixture
def record(tmp_path):
    """Return a function that makes a run and reads it back."""
    return lambda **options: Run(write_run(tmp_path / "run", **options))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_gini_is_half_the_mean_difference_over_the_mean(amounts):
    n, pairs = len(amounts), [abs(a - b) for a in amounts for b in amounts]
    expected = sum(pairs) / n**2 / (2 * sum(amounts) / n)
    assert devices.gini(amounts) == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=20),
    st.lists(st.floats(0, 200), max_size=10),
)
def test_work_before_an_instant_is_the_sum_of_overlaps(jobs, instants):
    start = np.array([a for a, _ in jobs])
    end = np.array([a + length for a, length in jobs])
    expected = [
        sum(max(0.0, min(t, e) - s) for s, e in zip(start, end, strict=True)) for t in instants
    ]
    got = devices.worked_by(start, end, np.array(instants))
    assert got == pytest.approx(expected, abs=1e-9)


def test_the_ledger_on_the_page_closes(record):
    run = record()
    busy_s, moved = run.jobs["busy_s"].sum(), run.jobs["moved_bytes"].sum()
    totals = {"device-hours": busy_s / 3600.0, "MB": moved / 1e6}
    drawn = {
        figure.x_title: sum(value for trace in figure.traces for value in trace["x"])
        for figure in costs.figures(run)
    }
    assert drawn == pytest.approx(totals, rel=1e-6)


def with_kinds(run, *, training, evaluation, query=None, download=0.0):
    """Give a run's jobs in turn a kind with a compute time; work is in proportion to it."""
    compute_s = {"train": training, "evaluate": evaluation, "query.sums": query}
    kinds = [kind for kind, seconds in compute_s.items() if seconds is not None]
    jobs = run.jobs.iloc[: len(run.jobs) // len(kinds) * len(kinds)].copy()
    jobs["kind"] = kinds * (len(jobs) // len(kinds))
    jobs["compute_s"] = jobs["kind"].map(compute_s)
    jobs["work"] = 2.0 * jobs["compute_s"]
    jobs["download_s"], jobs["upload_s"] = download, 0.0
    jobs["busy_s"] = jobs["compute_s"] + download
    jobs["downloaded_bytes"] = jobs["uploaded_bytes"] = 50.0
    jobs["moved_bytes"] = 100.0
    run.jobs = jobs
    return run


@pytest.mark.parametrize(
    ("spent", "said"),
    [
        (
            {"training": 19.0, "evaluation": 81.0},
            "evaluation took 81% of the work, 81% of the device-hours and 50% of the traffic",
        ),
        (
            {"training": 60.0, "evaluation": 2.0, "query": 38.0},
            "evaluation took 33% of the traffic; queries took 38% of the work, 38% of the "
            "device-hours and 33% of the traffic",
        ),
        (
            {"training": 94.0, "evaluation": None, "download": 6.0},
            "downloads took 6% of the device-hours and 50% of the traffic",
        ),
        ({"training": 96.0, "evaluation": None, "download": 4.0}, ""),
    ],
)
def test_what_takes_a_twentieth_besides_training_is_named(record, spent, said):
    run = with_kinds(record(), **spent)
    assert costs.besides_training(run) == (said and f"besides training, {said}")
    assert (f"Besides training, {said}." in lead(run)) == bool(said)
    by_id = {figure.id: figure for figure in costs.figures(run)}
    assert ("work" in by_id) == (spent["evaluation"] is not None)
    if spent["evaluation"] == 81.0:
        assert "in all: evaluation 81%, training 19%. " in by_id["work"].about
        assert "in all: evaluation 81%, training 19%. " in by_id["device-hours"].about


def test_bytes_count_from_the_instant_at_which_a_device_is_done(record):
    run = record()
    instants = np.array([0.0, 95.0, 500.0, 1e9])
    rows = list(zip(run.jobs["ended_at"], run.jobs["moved_bytes"], strict=True))
    expected = [sum(moved for ended, moved in rows if ended <= t) for t in instants]
    assert learning.spent_by(run, "moved_bytes", instants).tolist() == expected


def test_a_metric_can_be_drawn_against_time_versions_and_costs(record):
    run = record()
    loss = learning.metrics(run)[1]
    titles = [axis["title"]["text"] for axis, _ in loss.others]
    assert [title.split(" (")[0] for title in titles] == [
        "versions of the model",
        "traffic",
        "work of all devices",
    ]
    rows = run.metrics[(run.metrics["source"] == "server") & (run.metrics["name"] == "loss")]
    (_, versions), (_, traffic), (_, work) = loss.others
    assert versions[0] == rows["version"].tolist()
    moved = learning.spent_by(run, "moved_bytes", rows["time_s"].to_numpy())
    assert traffic[0] == pytest.approx(moved / 1e6)
    busy = learning.spent_by(run, "busy_s", rows["time_s"].to_numpy())
    assert work[0] == pytest.approx(busy / 3600.0)


def test_devices_that_never_took_part_count_in_participation(record):
    run = record(n_jobs=7, n_devices=100)
    counts = devices.used_jobs(run)
    assert (len(counts), counts.sum()) == (100, 3)
    assert "of 100 devices" in devices.participation(run).about


def test_staleness_counts_every_merged_update(record):
    run = record()
    staleness, weights = learning.aggregation(run)
    assert sum(staleness.traces[0]["y"]) == run.jobs["staleness"].notna().sum()
    assert sum(weights.traces[0]["customdata"]) == run.jobs["weight"].notna().sum()


def test_weights_are_listed_by_staleness(record):
    run = record()
    *_, weights = learning.aggregation(run)
    merged = run.jobs[run.jobs["weight"].notna()]
    of_two = merged[merged["staleness"] == 2]
    row = next(row for row in weights.rows if row[0] == "2")
    assert row[1:] == (str(len(of_two)), *[f"{1 / np.sqrt(3):.3f}"] * 3)


def test_reliability_is_what_came_back_of_what_was_said(record):
    run = record()
    assert devices.reliability(run) is None
    status = run.jobs["status"]
    # Said 0.8 of jobs that came back and of those that got lost, 0.3 of one more that got lost.
    run.jobs["reported_p_finish"] = np.where(status.isin(["reported", "interrupted"]), 0.8, np.nan)
    run.jobs.loc[status.eq("late").idxmax(), "reported_p_finish"] = 0.3
    figure = devices.reliability(run)
    n_back, n_lost = (status == "reported").sum(), (status == "interrupted").sum()
    assert figure.traces[0]["x"] == pytest.approx([0.8])
    assert figure.traces[0]["y"] == pytest.approx([n_back / (n_back + n_lost)])
    assert figure.rows[0] == ("0.30", "0.00", "1")
    brier = (n_back * 0.04 + n_lost * 0.64 + 0.09) / (n_back + n_lost + 1)
    assert f"Brier score {brier:.3f}" in figure.about


def test_failures_are_counted_by_ending_and_reason(record):
    run = record()
    figure = costs.failures(run)
    counts = run.jobs["status"].value_counts()
    assert dict(zip(figure.traces[0]["y"], figure.traces[0]["x"], strict=True)) == {
        name: counts[name] for name in ("interrupted", "late", "expired")
    }
    assert ("late", "it ended as late", "10") in figure.rows


def test_states_sum_to_the_work_of_jobs_and_the_rest_of_who_was_online(record):
    online = [(f"phone-{i}", 0.0, 1500.0, True) for i in range(7)]
    run = record(online=online)
    figure = devices.states(run)
    hours = {trace["name"]: np.array(trace["y"][:-1]) for trace in figure.traces}
    edges = (
        np.array(figure.traces[0]["x"])
        * {"min": 60.0, "h": 3600.0}[
            figure.x_title.removeprefix("virtual time (").removesuffix(")")
        ]
    )
    spent = {name: float(values @ np.diff(edges)) for name, values in hours.items()}
    used = run.jobs[run.jobs["status"] == "reported"]
    assert spent["training"] == pytest.approx((used["trained_at"] - used["downloaded_at"]).sum())
    until = edges[:-1] + np.diff(edges) <= 1500.0
    total = sum(hours.values())
    assert total[until] == pytest.approx(7.0)
    assert "of 7 devices were online" in figure.about


def test_a_run_tells_when_it_reached_a_target(record):
    run = record()
    at_s, losses = run.curve("loss", "server")
    assert run.time_to("loss 0.1") == at_s[losses <= 0.1][0]
    accuracies = run.curve("accuracy", "server")[1]
    assert run.time_to("accuracy 0.9") == at_s[accuracies >= 0.9][0]
    assert run.time_to("accuracy 1.5") == np.inf
    for wrong in ("acuracy 0.9", "100 rounds"):
        with pytest.raises(ConfigError, match=r"expected one of .*'accuracy'"):
            run.time_to(wrong)
