"""Methods of the repository are methods of the suite, and its table is what was measured."""

import json
from statistics import fmean

import pytest
from places import ROOT

import pages
from fedstale.contrib.suite import Setting, standing, table
from fedstale.contrib.suite.judging import REFERENCE, TABLE, Method, cell
from fedstale.strategies import StaleStrategy
from suite.table import across

FILES = sorted((ROOT / "benchmarks" / "suite" / "methods").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_method_on_every_scenario(path):
    method = Method.of(str(path))
    for setting in Setting.all().values():
        for rate in method.rates:
            assert isinstance(method.strategy(setting.seen(1), rate), StaleStrategy)


def test_titles_tell_methods_apart_and_one_is_the_reference():
    titles = [Method.of(str(path)).title for path in FILES]
    assert len(set(titles)) == len(titles)
    assert REFERENCE in titles


def test_the_table_that_comes_with_fedstale_is_the_result():
    shipped = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    measured = pages.rows("suite")
    assert shipped == [{name: row[name] for name in row if name != "tuned"} for row in measured]
    assert TABLE.stat().st_size < 200_000
    for row in measured:
        setting = Setting.find(row["scenario"]).table
        runs = [(run["skew"], run["seed"]) for run in row["runs"]]
        assert len(runs) == len(set(runs)) == len(setting["skews"]) * len(setting["seeds"])
        assert {seed for _, seed in runs} == set(setting["seeds"])
        assert {run["seed"] for run in row["tuned"]} == set(setting["tuning-seeds"])
        assert not row["quick"]


def test_no_standing_rate_stands_at_an_end_of_its_grid():
    at_an_end = {
        row["method"]
        for row in pages.rows("suite")
        if row["rate"] in (min(rates := {run["rate"] for run in row["tuned"]}), max(rates))
    }
    # A share of the mixture, which is below 1.
    assert at_an_end <= {"FedAsync"}


def test_a_standing_row_is_of_the_file_that_is_there():
    checksums = {Method.of(str(path)).checksum for path in FILES}
    assert {row["checksum"] for row in pages.rows("suite")} <= checksums


def test_the_page_shows_the_table_and_the_reference_is_in_it():
    rows = standing("phones-v1")
    assert REFERENCE in {row["method"] for row in rows}
    assert table(rows) in (ROOT / "docs/contrib/suite.md").read_text(encoding="utf-8")


def times_of_reference(rows, method):
    """Return the interval of a method's device-hours, as the page tells it, and its ends."""
    told = cell(rows[method], rows[REFERENCE], "device_hours")
    told = told[told.index("(") :]
    return told, [float(end) for end in told.strip("()").split(" to ")]


def test_the_page_says_whose_rank_is_another_on_another_scenario():
    page = " ".join((ROOT / "docs/contrib/suite.md").read_text(encoding="utf-8").split())

    def ends(method, place):
        rows = {row["method"]: row for row in standing(f"{place}-v1")}
        told, found = times_of_reference(rows, method)
        assert f"{told} on {place}" in page
        return found

    for method, level, worse in [
        ("ACED", "phones", "desktops"),
        ("ACED", "phones", "sites"),
        ("FedAvg", "sites", "phones"),
    ]:
        low, high = ends(method, level)
        assert low < 1.0 < high
        assert ends(method, worse)[0] > 1.0


def test_the_page_says_where_adasync_takes_the_fewest_device_hours():
    page = " ".join((ROOT / "docs/contrib/suite.md").read_text(encoding="utf-8").split())
    places = [name.removesuffix("-v1") for name in Setting.all()]
    first, below = [], {}
    for place in places:
        rows = {row["method"]: row for row in standing(f"{place}-v1")}
        hours = {
            method: fmean(run["device_hours"] for run in row["runs"])
            for method, row in rows.items()
        }
        first += [place] * (min(hours, key=hours.get) == "AdaSync")
        told, (_, high) = times_of_reference(rows, "AdaSync")
        if high < 1.0:
            below[place] = told
    assert f"in the mean on {first[0]}, {first[1]} and {first[2]}, and" in page
    (place, told), *more = below.items()
    assert not more
    assert f"on {place} alone {told} it is shown" in page


def test_methods_are_set_beside_the_reference_of_each_scenario_that_has_one():
    def row(scenario, method, device_hours):
        runs = [
            {"seed": seed, "reached": 1.0, "device_hours": value}
            for seed, value in enumerate(device_hours)
        ]
        return {"scenario": scenario, "method": method, "runs": runs}

    rows = [
        row("phones-v1", "Worse", [4.0, 8.0, 6.0]),
        row("phones-v1", REFERENCE, [2.0, 4.0, 3.0]),
        row("cars-v1", REFERENCE, [10.0, 20.0, 15.0]),
        row("cars-v1", "Better", [5.0, 10.0, 7.5]),
        row("sites-v1", "Better", [5.0, 10.0, 7.5]),
    ]
    assert across(rows).splitlines() == [
        "| method | phones-v1 | cars-v1 |",
        "|---|---:|---:|",
        "| Better | - | 7.5 (0.50 to 0.50) |",
        "| FedBuff | 3 | 15 |",
        "| Worse | 6 (2.00 to 2.00) | - |",
    ]
