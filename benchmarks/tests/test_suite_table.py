"""Methods of the repository are methods of the suite, and its table is what was measured."""

import json

import pytest
from places import ROOT

import pages
from fedstale.contrib.suite import Setting, standing, table
from fedstale.contrib.suite.judging import REFERENCE, TABLE, Method
from fedstale.strategies import StaleStrategy

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
    assert shipped == pages.rows("suite")
    assert TABLE.stat().st_size < 200_000
    for row in shipped:
        setting = Setting.find(row["scenario"]).table
        runs = [(run["skew"], run["seed"]) for run in row["runs"]]
        assert len(runs) == len(set(runs)) == len(setting["skews"]) * len(setting["seeds"])
        assert {seed for _, seed in runs} == set(setting["seeds"])
        assert {run["seed"] for run in row["tuned"]} == set(setting["tuning-seeds"])
        assert not row["quick"]


def test_a_standing_row_is_of_the_file_that_is_there():
    checksums = {Method.of(str(path)).checksum for path in FILES}
    assert {row["checksum"] for row in pages.rows("suite")} <= checksums


def test_the_page_shows_the_table_and_the_reference_is_in_it():
    rows = standing("phones-v1")
    assert REFERENCE in {row["method"] for row in rows}
    assert table(rows) in (ROOT / "docs/contrib/suite.md").read_text(encoding="utf-8")
