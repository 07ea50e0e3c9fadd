import re

import numpy as np
import pytest
from compared_runs import write_finished

from fedstale.comparison.analysis import (
    analyse,
    deciding_source,
    finished,
    grouped,
    reached,
    target_source,
)
from fedstale.comparison.page import as_json
from fedstale.comparison.statistics import difference
from fedstale.errors import ConfigError
from fedstale.reports.run import Run
from fedstale.until import Until

TARGET = Until.parse("accuracy 0.8")


@pytest.fixture
def measured(tmp_path):
    """Return a function that writes a run and reads it back."""
    count = 0

    def make(**options):
        nonlocal count
        count += 1
        return finished(write_finished(tmp_path / str(count), **options))

    return make


def test_the_target_is_reached_at_the_first_measurement_that_meets_it(measured):
    run = measured(accuracies=[(0.0, 0.1), (100.0, 0.8), (200.0, 0.7), (300.0, 0.9)])
    found = reached(run, TARGET, "server", 3600.0)
    assert (found.at_s, found.ever) == (100.0, True)


@pytest.mark.parametrize(
    ("options", "counts_as"),
    [
        (dict(status="stopped", end_s=3600.0, until="1h"), 3600.0),
        # Its model stays what it is until the time is over.
        (dict(status="finished", end_s=500.0, until="1h"), 3600.0),
        # What was cut off by rounds might have got there right after.
        (dict(status="stopped", end_s=500.0, until="9 rounds"), 500.0),
        (dict(status="finished", end_s=500.0, until=None), 9000.0),
        (dict(status="stuck", end_s=500.0, until=None), 9000.0),
    ],
)
def test_a_run_that_never_gets_there_counts_with_the_time_it_had(measured, options, counts_as):
    run = measured(accuracies=[(0.0, 0.1)], **options)
    found = reached(run, TARGET, "server", horizon_s=9000.0)
    assert (found.at_s, found.ever) == (counts_as, False)


def test_a_central_evaluation_decides_only_if_all_runs_have_it(measured):
    central = measured(accuracies=[(1.0, 0.5)])
    by_clients = measured(accuracies=[(1.0, 0.5)], source="evaluate")
    assert deciding_source([central, central], "accuracy") == "server"
    assert deciding_source([by_clients], "accuracy") == "evaluate"
    assert deciding_source([central, by_clients], "accuracy") == "server"
    assert deciding_source([central], "speed") is None


def test_a_target_that_no_run_measured_is_one_sentence(measured):
    runs = [measured(accuracies=[(1.0, 0.5)])]
    with pytest.raises(ConfigError, match=r"no run measured 'acuracy'.*expected 'accuracy'"):
        target_source(runs, Until.parse("acuracy 0.8"))
    training = [measured(accuracies=[(1.0, 0.5)], source="train")]
    with pytest.raises(ConfigError, match="expected an evaluating app"):
        target_source(training, TARGET)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_came_to_no_end_is_not_read(measured, status):
    with pytest.raises(ConfigError, match="expected a run that came to its end"):
        measured(status=status)


def test_runs_are_grouped_by_what_differs_but_seeds(tmp_path):
    folders = [
        write_finished(
            tmp_path / f"{strategy}-{seed}",
            seed=seed,
            workers=seed + 1,
            run_config={"strategy": strategy, "seed": seed, "alpha": 0.5},
        )
        for strategy in ("fedavg", "fedbuff")
        for seed in (1, 2)
    ]
    found = {
        name: [run.folder for run in runs]
        for name, runs in grouped([Run(f) for f in folders]).items()
    }
    assert found == {"strategy=fedavg": folders[:2], "strategy=fedbuff": folders[2:]}


def test_a_cost_that_follows_a_key_is_not_named_beside_it(tmp_path):
    folders = [
        write_finished(tmp_path / str(n), run_config={"local-epochs": n}, costs={"epochs": n})
        for n in (5, 20)
    ]
    assert list(grouped([Run(f) for f in folders])) == ["local-epochs=5", "local-epochs=20"]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["/a b/phones.parquet", "/a b/cars.parquet"], ["phones.parquet", "cars.parquet"]),
        (["/a/phones.parquet", "/b/phones.parquet"], ["/a/phones.parquet", "/b/phones.parquet"]),
    ],
)
def test_files_are_named_without_their_folders_unless_these_tell_them_apart(tmp_path, files, names):
    runs = [Run(write_finished(tmp_path / str(i), traces=traces)) for i, traces in enumerate(files)]
    assert list(grouped(runs)) == [f"traces={name}" for name in names]


def test_a_seed_that_only_some_runs_pass_on_is_a_difference(tmp_path):
    folders = [
        write_finished(tmp_path / str(seed), seed=seed, run_config={"seed": min(seed, 2)})
        for seed in (1, 2, 3)
    ]
    sizes = {name: len(runs) for name, runs in grouped([Run(f) for f in folders]).items()}
    assert sizes == {"seed=1": 1, "seed=2": 2}


def test_two_runs_of_the_same_settings_and_seed_are_one_sentence(tmp_path):
    folders = [write_finished(tmp_path / name) for name in "ab"]
    with pytest.raises(ConfigError, match="have the same settings and seed 0"):
        grouped([Run(folder) for folder in folders])


def test_a_comparison_pairs_seeds_and_counts_who_got_there(measured):
    runs = {
        "slow": [
            measured(seed=1, accuracies=[(0.0, 0.1), (1000.0, 0.8)]),
            measured(seed=2, accuracies=[(0.0, 0.1), (2000.0, 0.7)]),
        ],
        "fast": [
            measured(seed=2, accuracies=[(0.0, 0.1), (900.0, 0.9)]),
            measured(seed=1, accuracies=[(0.0, 0.1), (500.0, 0.9)]),
        ],
    }
    found = analyse(runs, reference="slow", target="accuracy 0.8")
    slow, fast = found.variants
    assert (slow.n_reached, fast.n_reached) == (1, 2)
    assert slow.time.mean == (1000.0 + 3600.0) / 2
    # Ratios 2 and 4; the reference never got there with one of the seeds.
    assert fast.speed_up.ratio.mean == pytest.approx(np.sqrt(8.0))
    assert fast.speed_up.bound == "at least"
    assert fast.differences["server accuracy"].mean == pytest.approx(0.15)
    assert slow.differences == {}
    assert fast.means["device_time_wasted"].mean == pytest.approx(40 / 130)
    plain = as_json(found)
    rows = {(row["variant"], row["measure"]): row for row in plain["table"]}
    assert rows[slow.name, "time_to_target_s"]["note"] == "at least"
    assert rows[slow.name, "reached_share"]["mean"] == 0.5
    assert rows[slow.name, "reached_share"]["low"] is None
    assert [run["reached"] for run in plain["runs"]] == [True, False, True, True]


def test_device_hours_to_the_target_count_work_up_to_it(measured):
    # One device is at work for 90 s from the start, and one from the 15th to the 55th second.
    runs = {
        name: [
            measured(seed=seed, accuracies=[(0.0, 0.1), (at_s + seed, 0.9)]) for seed in (1, 2, 3)
        ]
        for name, at_s in (("early", 20.0), ("late", 200.0))
    }
    early, late = analyse(runs, reference="late", target="accuracy 0.8").variants
    assert early.times[1].device_s == (21.0 - 5.0) + (21.0 - 15.0)
    assert late.times[1].device_s == 90.0 + 40.0
    ratios = [130.0 / spent for spent in (22.0, 24.0, 26.0)]
    assert early.device_speed_up.ratio.values == pytest.approx(ratios)


def test_intervals_of_what_runs_measured_hold_only_what_can_be(measured):
    runs = {
        name: [
            measured(seed=seed, accuracies=[(0.0, 0.0), (at_s, last)])
            for seed, (at_s, last) in enumerate(ends)
        ]
        for name, ends in (
            ("wide", [(10.0, 0.05), (3000.0, 1.0), (20.0, 1.0)]),
            ("other", [(50.0, 1.0), (60.0, 0.1), (70.0, 0.1)]),
        )
    }
    wide, _ = analyse(runs, reference="other", target="accuracy 0.05").variants
    accuracy, paired = wide.means["server accuracy"], wide.differences["server accuracy"]
    assert (accuracy.low, accuracy.high) == (0.0, 1.0)
    assert (paired.low, paired.high) == (-1.0, 1.0)
    assert wide.time.low == 0.0
    assert wide.speed_up.ratio.low > 0.0


def test_where_every_run_failed_the_reasons_are_told():
    failures = [("A", 1, "no data"), ("B", 1, "no data")]
    found = analyse({"A": [], "B": []}, reference="A", target="accuracy 0.8", failures=failures)
    assert len(as_json(found)["failed"]) == 2
    assert found.words.shape[0] == 2
    assert set(found.words.to_numpy().ravel()) <= {"0", "-", "A", "B"}


def test_long_names_of_variants_stay_distinct_and_terminals_obey_none(tmp_path):
    notes = ["x" * 200 + "1", "x" * 200 + "2", "\x1b[2J"]
    folders = [
        write_finished(tmp_path / str(i), run_config={"note": note}) for i, note in enumerate(notes)
    ]
    names = list(grouped([Run(folder) for folder in folders]))
    assert len(set(names)) == 3
    assert all(len(name) <= 80 and name.isprintable() for name in names)


def test_a_variant_without_runs_keeps_its_place(measured):
    runs = {"A": [measured(seed=1, accuracies=[(0.0, 0.9)])], "B": []}
    failures = [("B", 1, "no data")]
    found = analyse(runs, reference="B", target="accuracy 0.8", failures=failures)
    assert [len(one.runs) for one in found.variants] == [1, 0]
    assert as_json(found)["failed"] == [{"variant": "B", "seed": 1, "reason": "no data"}]
    assert found.variants[0].speed_up is None


def ended(measured, **ends):
    """Write runs of variants, of three seeds each, from the accuracies at their end."""
    return {
        name: [
            measured(seed=seed, accuracies=[(0.0, 0.1), (at_s + 10 * seed, last)])
            for seed, last in enumerate(lasts)
        ]
        for name, (at_s, *lasts) in ends.items()
    }


@pytest.mark.parametrize("reference", ["first", "second", "third"])
def test_the_two_best_are_judged_against_each_other_once(measured, reference):
    runs = ended(
        measured,
        third=(20.0, 0.1, 0.2, 0.3),
        first=(20.0, 0.7, 0.8, 0.9),
        second=(20.0, 0.65, 0.76, 0.87),
    )
    found = analyse(runs, reference=reference)
    assert [one.name for one in found.ranked] == ["first", "second", "third"]
    lines = found.verdict.split("\n")
    (pair,) = (line for line in lines if {"first", "second"} <= set(re.findall(r"\w+", line[:60])))
    sign = "-" if reference == "first" else "+"
    assert f"ends with the {'worse' if sign == '-' else 'better'} accuracy: {sign}0.040 (" in pair
    assert pair.startswith("The two best: first against second") == (reference == "third")
    other = "second" if reference == "first" else reference
    (cost,) = (line for line in lines if "device-hours" in line)
    assert cost == (
        "first has the best mean accuracy at the end, for 0.036 ± 0.000 device-hours: "
        f"+0.000 (+0.000 to +0.000) against {other}."
    )


def test_the_device_hours_of_the_best_count_to_the_target_in_pairs(measured):
    runs = ended(
        measured,
        never=(20.0, 0.1, 0.2, 0.3),
        late=(60.0, 0.9, 0.9, 0.9),
        early=(20.0, 0.9, 0.9, 0.9),
    )
    found = analyse(runs, reference="late", target="accuracy 0.8")
    assert [one.name for one in found.ranked] == ["early", "late"]
    early, late = (one.device_hours for one in found.ranked)
    told = difference(early, late).ends()
    assert found.cost("early").endswith(f"device-hours: {told} against late")
    assert found.verdict.endswith(f"best mean time to accuracy 0.8, for {found.cost('early')}.")
    assert "device-hours: at most -" in analyse(
        runs, reference="never", target="accuracy 0.8"
    ).cost("early")
