"""Metrics that are NaN, infinite, of no examples, or in tables and lists: all of them are shown."""

import json

import numpy as np
import pytest
from invoked_command import invoked
from written_apps import write_app

import fedstale
from fedstale.until import Until

NAN, INF = float("nan"), float("inf")
SHAPES = "flower", "fedstale", "messages", "older"


def values(run, source, name):
    rows = run.metrics[(run.metrics.source == source) & (run.metrics.name == name)]
    return rows["value"].tolist()


def odd(simulated, shape, **constants):
    return simulated("odd_metrics", constants={"SHAPE": shape, **constants})


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_bad_device_hides_nothing_of_what_the_others_measure_and_is_counted(
    simulated, shape, bad
):
    run = odd(simulated, shape, LOSSES=(1.0, 2.0, 3.0, bad))
    assert run.status == "finished"
    assert values(run, "evaluate", "loss")[-1] == 2.0
    expected = {"train loss": 8, "evaluate loss": 8}
    if shape != "older":
        assert values(run, "train", "loss")[-1] == 2.0
        expected |= {"train both.0": 8, "evaluate both.0": 8}
    assert run.summary["not_numbers"] == {name: n // 4 for name, n in expected.items()}
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "loss in 2 train replies" in page


@pytest.mark.parametrize("shape", SHAPES)
def test_what_no_client_measures_as_a_number_is_shown_as_none(simulated, shape):
    run = odd(simulated, shape, LOSSES=(NAN,) * 4)
    assert np.isnan(values(run, "evaluate", "loss")[-1])
    assert run.summary["not_numbers"]["evaluate loss"] == 8
    assert strict((run.folder / "summary.json").read_text())["metrics"]["evaluate loss"] is None
    assert np.isnan(run.last("evaluate")["loss"])


def test_what_a_function_of_the_app_makes_of_a_bad_reply_is_shown_as_it_is(simulated):
    run = odd(simulated, "flower", LOSSES=(1.0, 2.0, 3.0, INF), OWN_MEAN=True)
    assert values(run, "evaluate", "loss") == [INF, INF]
    assert values(run, "train", "loss") == [2.0, 2.0]


def test_clients_that_state_no_examples_leave_a_mean_without_a_number_and_end_nothing(simulated):
    run = odd(simulated, "messages", EXAMPLES=0)
    assert run.status == "finished"
    assert np.isnan(values(run, "train", "loss")).tolist() == [True, True]
    assert not run.summary["not_numbers"]
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "loss, as no train reply with it states examples" in page


@pytest.mark.parametrize("shape", ["flower", "fedstale", "older"])
def test_a_central_evaluation_may_end_with_what_is_no_number(simulated, shape):
    run = odd(simulated, shape, CENTRAL={"loss": NAN, "accuracy": INF, "lag": 1.0})
    assert np.isnan(values(run, "server", "loss")).all()
    assert run.summary["not_numbers"] == {"server loss": 3, "server accuracy": 3}
    assert run.summary["metrics"]["server lag"] == 1.0
    assert "loss in 3 central evaluations" in (run.folder / "report.html").read_text("utf-8")
    assert run.plot("loss", against="versions") is not None


@pytest.mark.parametrize("shape", ["flower", "fedstale", "older"])
def test_tables_and_lists_of_the_server_are_metrics_under_dotted_names(simulated, shape):
    nested = {"loss": 0.5, "per_class": {"cat": {"f1": 0.25}, "dog": 1}, "auc": [0.5, 0.75]}
    run = odd(simulated, shape, CENTRAL={**nested, "note": "text"})
    assert run.last("server") == {
        **{"loss": 0.5, "per_class.cat.f1": 0.25, "per_class.dog": 1.0},
        **{"auc.0": 0.5, "auc.1": 0.75},
    }


@pytest.mark.parametrize("shape", ["flower", "fedstale", "messages"])
def test_lists_of_clients_are_averaged_element_by_element(simulated, shape):
    run = odd(simulated, shape)
    assert (run.last("train")["both.0"], run.last("evaluate")["both.1"]) == (3.0, 1.0)


def test_runs_without_numbers_are_compared_and_listed_like_others(simulated, tmp_path, capsys):
    runs = [odd(simulated, "messages", LOSSES=(loss,) * 4) for loss in (1.0, NAN, INF)]
    found = fedstale.compare(runs, out=tmp_path / "compared")
    strict((tmp_path / "compared" / "comparison.json").read_text())
    assert "loss" in found.shown
    code, shown, _ = invoked(["runs", tmp_path, "--json"], capsys)
    assert code == 0
    assert len(strict(shown)) == 3


def test_an_infinite_metric_reaches_no_target():
    for metric, value in (("accuracy", INF), ("loss", -INF), ("loss", NAN)):
        assert not Until.parse(f"{metric} 0.5").is_reached(1, {metric: value})


def test_the_command_says_in_one_sentence_what_is_no_number(tmp_path, capsys):
    constants = {"SHAPE": "messages", "LOSSES": (1.0, 2.0, 3.0, NAN)}
    app = write_app(tmp_path / "app", "odd_metrics", **constants)
    out = ["-o", str(tmp_path / "run")]
    code, shown, _ = invoked(["simulate", app, "--traces", "ideal:4", *out], capsys)
    assert code == 0
    assert "NaN or infinite: loss in 2 train replies" in shown
