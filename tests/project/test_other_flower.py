"""The table of what runs with which Flower."""

import runpy

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def other_flower():
    return runpy.run_path(str(ROOT / "tests" / "other_flower.py"))


def test_every_test_that_it_runs_is_there(other_flower):
    for arguments in other_flower["GROUPS"].values():
        paths = [word for word in arguments if word.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)


def test_a_column_of_the_page_stands_for_each_group(other_flower):
    page = other_flower["PAGE"].read_text(encoding="utf-8")
    heading = next(x for x in page.splitlines() if x.startswith(other_flower["HEADING"]))
    assert [cell.strip() for cell in heading.strip("|").split("|")] == [
        *("Flower", *other_flower["GROUPS"], "off")
    ]


@pytest.mark.parametrize("after", ["\nb\n", ""], ids=["text", "end"])
def test_a_row_takes_the_place_of_that_of_its_release_and_all_are_in_order(other_flower, after):
    page = f"a\n\n| Flower | x |\n|---|---|\n| 1.42.0 | old |\n{after}"
    for row in ("| 1.42.0 | new |\n", "| 1.41.0 | first |\n"):
        page = other_flower["written"](page, row)
    assert page == f"a\n\n| Flower | x |\n|---|---|\n| 1.41.0 | first |\n| 1.42.0 | new |\n{after}"


def test_what_real_devices_need_is_one_word_where_all_of_it_is_off(other_flower):
    features = other_flower["FEATURES"]
    real = {feature.name for feature in features if feature.since == other_flower["REAL_DEVICES"]}
    shown = other_flower["shown"]
    assert shown(set()) == "nothing"
    assert shown({*real, "turns"}) == "real devices, turns"
    assert shown({min(real)}) == min(real)
