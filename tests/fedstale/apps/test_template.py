"""The app of `fedstale new` has what pages and advice ask an app to have."""

import re

import pytest
from places import APPS, ROOT, TEMPLATE

import fedstale
from fedstale.deployment.check import check_app
from fedstale.reports import advice
from fedstale.simulation.flower_app import FlowerApp, overrides_in

ASKED = 'FedBuff(6, 3, stages=[Compression("int8"), LocalWork(0.5), ForecastRequest()])'


def test_it_has_the_keys_that_all_built_in_apps_have():
    shared = set.intersection(
        *(set(FlowerApp.find(APPS[name]).defaults) for name in ("digits", "fashion"))
    )
    # It trains in batches of ten: one key less to read for who begins.
    assert shared - {"alpha", "batch-size"} <= set(FlowerApp.find(TEMPLATE).defaults)


def test_what_advice_names_is_there():
    found = FlowerApp.find(TEMPLATE)
    assert {advice._EPOCHS, advice._ROUND_TIMEOUT} <= set(found.defaults)
    assert check_app(found, f"strategy='{ASKED}' forecasts=true") == []
    for form in '"int8"', 'down="int8"':
        run_config = f"strategy='FedBuff(6, 3, stages=[Compression({form})])'"
        assert check_app(found, run_config) == []


@pytest.mark.parametrize(
    "page", ["smaller-jobs", "strategies", "deploy", "watch", "forecasting", "traces"]
)
def test_the_settings_of_pages_are_those_of_the_app(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found, n = FlowerApp.find(TEMPLATE), 0
    for given in re.findall(r'digits .*?(?:-c|--run-config) "((?:\\.|[^"\\])+)"', text):
        overrides = overrides_in([given.replace('\\"', '"')], "run-config")
        assert check_app(found, given.replace('\\"', '"')) == [], overrides
        n += 1
    assert n, "the page has such a command"


def test_its_clients_do_what_stages_ask(tmp_path):
    run = fedstale.simulate(
        TEMPLATE,
        traces="synthetic:8@sites",
        run_config={"strategy": ASKED, "forecasts": True, "num-server-rounds": 3},
        out=tmp_path / "run",
        executor="inline",
    )
    assert run.status == "finished"
    assert run.summary["hint"].startswith("the run is shorter than any change of its devices")
    assert "WARNING" not in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    trained = run.jobs[(run.jobs["kind"] == "train") & (run.jobs["status"] == "reported")]
    assert set(trained["work_share"]) == {0.5}
    # 12 of the 25 steps of five epochs of five batches.
    assert set(run.jobs["kind"]) > {"train"}, "devices are asked for forecasts"
