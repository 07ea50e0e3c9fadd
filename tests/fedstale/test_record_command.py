"""`fedstale traces record` and `merge`, as a person types them; a real machine records itself."""

import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.record import merge, record
from fedstale.traces import TraceSet
from fedstale.traces.recording.journal import Journal, RecordingRun
from fedstale.traces.recording.monitor import Reading

pytest.importorskip("psutil", reason="needs fedstale[client]")

app = typer.Typer()
app.command()(record)
app.command()(merge)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_machine_records_itself_and_the_file_is_a_trace(tmp_path):
    out = tmp_path / "phone.parquet"
    words = ("--out", out, "--every", "1s", "--for", "1s", "--available", "recording")
    done = run("record", *words, "--compute", "3 units", "--network", "50M,10M")
    assert done.exit_code == 0, done.output
    traces = TraceSet.read(out)
    assert list(traces.device_ids) == ["phone"]
    assert traces.known == ("availability", "compute", "downlink", "uplink")
    windows = traces.availability.windows(0)[0]
    assert windows.shape == (1, 2)
    assert windows[0, 1] == pytest.approx(1.0, abs=0.3)
    assert traces.downlink.value_at([0], 0.5) == 50e6
    assert 0 <= traces.compute.value_at([0], 0.5)[0] <= 3


def write_journal(out):
    """Write what a recorder of a file leaves that was killed."""
    about = RecordingRun(device_id=out.stem, interval_s=1.0, utc_offset_s=0.0)
    with Journal(out.with_name(f"{out.name}.journal"), about, max_bytes=10**6) as journal:
        for k in range(3):
            reading = Reading(instant=1.7e9 + k, online=True, processor_left=0.5)
            journal.append(reading, 10.0 + k)


def test_a_journal_can_be_finished_without_recording_more(tmp_path):
    out, second = tmp_path / "phone.parquet", tmp_path / "tablet.parquet"
    rest = ("--every", "1s", "--compute", "1 unit", "--available", "recording", "--finish")
    for path, links in ((out, ("--network", "8k,4k")), (second, ())):
        write_journal(path)
        done = run("record", "--out", path, *rest, *links)
        assert done.exit_code == 0, done.output
    assert TraceSet.read(out).uplink.value_at([0], 0.5) == 4000
    fleet = tmp_path / "fleet.parquet"
    assert "given twice" in run("merge", out, out, "--out", fleet).stderr
    done = run("merge", out, second, "--out", fleet)
    assert done.exit_code == 0, done.output
    assert "1 left out: downlink, not in a recording" in done.stderr
    assert list(TraceSet.read(fleet).device_ids) == ["phone", "tablet"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compute", "1"), "compute = '1': expected work units/s and what one unit is"),
        (("--compute", "models.json"), "compute = 'models.json': expected work units/s"),
        (("--compute", "0 u"), "speed = 0.0: expected a finite number > 0"),
        (("--compute", "1 unit", "--every", "100ms"), "every = '100ms'"),
        (("--compute", "1 unit", "--every", "2m"), "expected 1 to 60 s"),
        (("--compute", "1 unit", "--for", "forever"), "for = 'forever'"),
        (("--compute", "1 unit", "--for", "0s"), "duration_s = 0"),
        (("--compute", "1 unit", "--max-bytes", "1k"), "max_bytes = 1000"),
        (("--compute", "1 unit", "--network", "50M"), "expected DOWN,UP"),
        (("--compute", "1 unit", "--finish"), "no such journal"),
    ],
)
def test_what_cannot_be_recorded_is_one_sentence_and_nothing_is_written(tmp_path, words, said):
    done = run("record", "--out", tmp_path / "phone.parquet", *words)
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "phone.parquet").exists()
    assert not list(tmp_path.glob("*.journal/*.sqlite*"))


def test_a_machine_without_battery_refuses_the_rule_of_charging_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    out = tmp_path / "desktop.parquet"
    done = run("record", "--out", out, "--compute", "1 unit", "--available", "charging")
    assert done.exit_code == 2
    assert "cannot read whether it is" in done.output


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    out = tmp_path / "phone.parquet"
    out.write_text("mine")
    done = run("record", "--out", out, "--compute", "1 unit")
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert out.read_text() == "mine"
    assert run("merge", out, "--out", out).exit_code == 2
