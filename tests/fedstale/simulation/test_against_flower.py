"""On ideal devices the result is that of Flower's own simulation engine, bit for bit."""

import json

import pandas as pd
import pytest
from flower_engine import final_parts
from same_model import assert_same_model
from stock_app import IN_ONE_ORDER, NUMPY, STOCK, write_stock_app
from typer.testing import CliRunner

from fedstale.cli import main as cli


def fedstale(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.mark.parametrize(
    ("model", "strategy", "n"),
    [(NUMPY, STOCK, 2), (NUMPY, IN_ONE_ORDER, 5)],
    ids=["numpy, stock", "numpy, in one order"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_command_line_on_ideal_devices_ends_with_the_model_of_flowers_engine(
    tmp_path, model, strategy, n
):
    app = write_stock_app(tmp_path / "app", model, strategy, n)
    theirs = final_parts(app / "stock_app_under_test.py", n).arrays
    ours = fedstale("simulate", app, "--traces", f"ideal:{n}", "--out", tmp_path / "run")
    assert ours.exit_code == 0, ours.stderr
    assert_same_model(tmp_path / "run", theirs)


def test_nothing_takes_time_on_ideal_devices(tmp_path):
    app = write_stock_app(tmp_path / "app", NUMPY, STOCK, 3)
    run = fedstale("simulate", app, "--traces", "ideal:3", "--out", tmp_path / "run", "--json")
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["virtual_s"] == 0.0
    events = pd.read_parquet(tmp_path / "run" / "events.parquet")
    assert set(events["status"]) == {"reported"}
    instants = ["sent_at", "started_at", "trained_at", "reported_at", "ended_at", "delivered_at"]
    assert (events[[*instants, "download_s", "compute_s", "upload_s"]] == 0.0).all(axis=None)
    assert (events["uploaded_bytes"] > 0).all()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--traces", "ideal:0"], "expected ideal:N, such as ideal:100, with N >= 1"),
        (["--traces", "ideal:"], "expected ideal:N"),
        (["--traces", "ideal:3", "--until", "2h"], "no time passes on devices"),
        (["--traces", "idle:3"], "or ideal:N for N that take no time"),
    ],
)
def test_what_ideal_devices_cannot_be_is_one_sentence(tmp_path, words, sentence):
    run = fedstale("simulate", "digits", *words, "--out", tmp_path / "r")
    assert run.exit_code == 2
    assert sentence in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()
