import json
import re

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.traces import TraceSet
from fedstale.traces.forecast import Forecaster


@pytest.fixture(scope="module")
def phones(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "phones.parquet"
    TraceSet.synthetic(40, days=2, seed=0).write(path)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def train(phones, out, *more):
    return run("forecaster", "train", "--traces", phones, "--out", out, "--examples", 200, *more)


FAST = ["--step", "2h", "--examples", 200]


def test_a_forecaster_is_trained_and_tested(phones, tmp_path):
    made = train(phones, tmp_path / "own", "--kind", "last-value")
    assert made.exit_code == 0, made.output
    assert Forecaster.load(tmp_path / "own").kind == "last-value"
    assert made.stdout.splitlines()[1].startswith("no better than hourly, with ")
    plain = train(phones, tmp_path / "plain", "--kind", "persistence", "--json")
    assert json.loads(plain.stdout)["advice"].endswith(": use --kind hourly")
    tested = run(
        "forecaster",
        "backtest",
        "--traces",
        phones,
        "persistence",
        tmp_path / "own",
        "--out",
        tmp_path / "tables",
        *FAST,
    )
    assert tested.exit_code == 0, tested.output
    first, _ = tested.stdout.split("\n", maxsplit=1)
    assert re.match(r"last-value \(own\) .* of hourly's loss .*: use hourly\.", first)
    table = pd.read_csv(tmp_path / "tables" / "verdict.csv")
    assert list(table["forecaster"]) == ["last-value (own)", "persistence"]


def test_one_device_learns_on_the_first_part_of_its_record_and_is_tested_on_the_last(tmp_path):
    own = tmp_path / "phone.parquet"
    TraceSet.synthetic(1, days=8, seed=3).write(own)
    made = train(own, tmp_path / "lstm")
    assert made.exit_code == 0, made.output
    tested = run(
        *("forecaster", "backtest", "--traces", own, tmp_path / "lstm"),
        *("--step", "1h", "--examples", 200),
    )
    assert tested.exit_code == 0, tested.output
    assert re.match(r"lstm \(lstm\) .* of hourly's loss", tested.stdout)


def test_every_device_is_tested_where_none_was_learnt_from(phones, tmp_path):
    def tested(*more):
        done = run(
            *("forecaster", "backtest", "--traces", phones, "last-value"),
            *("embedded:cars", "--out", tmp_path / "tables", *FAST, *more),
        )
        assert done.exit_code == 0, done.output
        table = pd.read_csv(tmp_path / "tables" / "verdict.csv")
        assert set(table["forecaster"]) == {"last-value", "lstm (cars)"}
        return table["blocks"].max()

    # Otherwise a fifth of the devices is tested.
    assert 4 * tested() < tested("--all-devices")


def test_tables_as_json_are_one_object(phones):
    tested = run("forecaster", "backtest", "--traces", phones, "last-value", "--json", *FAST)
    assert tested.exit_code == 0, tested.output
    assert [row["forecaster"] for row in json.loads(tested.stdout)["verdict"]] == ["last-value"]


def test_an_lstm_is_trained_unless_asked_otherwise_and_is_two_files(phones, tmp_path):
    made = train(phones, tmp_path / "lstm")
    assert made.exit_code == 0, made.output
    assert Forecaster.load(tmp_path / "lstm").kind == "lstm"
    assert {p.name for p in (tmp_path / "lstm").iterdir()} == {
        "forecaster.toml",
        "forecaster.safetensors",
    }


def test_a_forecaster_is_not_overwritten(phones, tmp_path):
    assert train(phones, tmp_path, "--kind", "last-value").exit_code == 0
    again = train(phones, tmp_path, "--kind", "last-value")
    assert again.exit_code == 2
    assert "holds a forecaster" in again.output


def test_a_forecaster_of_another_split_is_not_tested(phones, tmp_path):
    train(phones, tmp_path, "--kind", "last-value", "--seed", 1)
    tested = run("forecaster", "backtest", "--traces", phones, tmp_path, "--seed", 0, *FAST)
    assert tested.exit_code == 2
    assert "same seed" in tested.output


TRAIN, BACKTEST = ("forecaster", "train", "--out", "new"), ("forecaster", "backtest")
LEARN, EVALUATE = ("agent", "train", "--out", "new"), ("agent", "evaluate")
NO_TIME = "traces = 'ideal:40': devices that take no time have nothing to f"


@pytest.mark.parametrize(
    ("words", "traces", "sentence"),
    [
        *((words, "ideal:40", NO_TIME) for words in (TRAIN, BACKTEST, LEARN, EVALUATE)),
        ((*EVALUATE, "--all-devices"), "ideal:40", NO_TIME),
        *((words, (4, 8), "4 devices: expected at least 5") for words in (LEARN, EVALUATE)),
        *((words, (1, 2), "record 5.0 days more") for words in (TRAIN, BACKTEST)),
        ((*TRAIN, "--kind", "prophet"), (40, 2), "expected one of"),
        ((*BACKTEST, "last-valu"), (40, 2), "expected one of last-value"),
        ((*BACKTEST, "forecasters/nowhere"), (40, 2), "or the folder of a trained one"),
        (
            (*BACKTEST, "embedded:trams"),
            (40, 2),
            "fedstale: fleet = 'trams': expected one of any, phones, desktops, cars\n",
        ),
    ],
)
def test_what_cannot_be_learnt_or_tested_is_one_sentence(
    tmp_path, monkeypatch, words, traces, sentence
):
    monkeypatch.chdir(tmp_path)
    if traces != "ideal:40":
        devices, days = traces
        TraceSet.synthetic(devices, days=days, seed=3).write("own.parquet")
        traces = "own.parquet"
    refused = run(*words, "--traces", traces)
    assert refused.exit_code == 2, refused.output
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()
