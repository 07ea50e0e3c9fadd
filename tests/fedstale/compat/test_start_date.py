"""Virtual time begins on a date on which no earlier run has left results."""

import datetime
from pathlib import Path

import pandas as pd
import pytest
from interruptions import no_pages
from written_apps import four_devices, write_app

import fedstale
from fedstale.compat import free_start

__all__ = ["no_pages"]

WEEK_S = 7 * 86_400.0
FIRST = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC).timestamp()

BY_DATE = """
import datetime
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    metrics = MetricRecord({"num-examples": 4})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    began = time.time()
    folder = Path.cwd() / datetime.datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=False)
    time.sleep(0.1)
    while time.time() < began + 7.3:
        time.sleep(0.7)
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(3)]), num_rounds=2)
    with open(f"model-{int(began)}.txt", "x") as file:
        file.write(time.strftime("%a %H"))
"""


@pytest.mark.usefixtures("no_pages")
def test_a_second_run_meets_no_folder_of_the_first(tmp_path, monkeypatch):
    app = write_app(tmp_path / "app", "message_api")
    (app / "message_api.py").write_text(BY_DATE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    runs = [
        fedstale.simulate(app, traces=four_devices(), out=tmp_path / f"run{i}") for i in range(2)
    ]
    assert [run.status for run in runs] == ["finished"] * 2, [run.reason for run in runs]
    folders = sorted(path.parent.name for path in Path("outputs").glob("*/*"))
    assert folders == ["2000-01-01", "2000-01-08"]
    # The hour and the weekday are the same, and so is what happens, to the last bit.
    assert {path.read_text() for path in Path().glob("model-*.txt")} == {"Sat 00"}
    first, second = (pd.read_parquet(tmp_path / f"run{i}" / "events.parquet") for i in range(2))
    pd.testing.assert_frame_equal(first, second, check_exact=True)


@pytest.mark.parametrize(
    ("name", "weeks"),
    [
        ("outputs/2000-01-01/00-00-00", 1),
        ("20000103_000000", 1),
        ("log.2000_01_07.txt", 1),
        ("a/b/c/run-946684812", 1),
        ("outputs/2026-11-28/12-00-00", 0),
        ("2000-01-08", 0),
        ("2000-13-01", 0),
        ("model-120000101999.npz", 0),
        ("version_1", 0),
    ],
)
def test_a_week_is_taken_where_a_name_tells_a_date_in_it(tmp_path, name, weeks):
    (tmp_path / name).mkdir(parents=True)
    assert free_start(FIRST, [tmp_path]) == FIRST + weeks * WEEK_S
