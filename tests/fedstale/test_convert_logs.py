"""Logs of other formats become traces by one command, which says how it read them."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.traces import TraceSet

HOUR = 3600.0
JUNE_UTC = 1_717_200_000  # 2024-06-01 00:00 UTC, 02:00 in Oslo


def convert(*words: object):
    typed = ["traces", "convert", *map(str, words)]
    with patch.object(sys, "argv", ["fedstale", *typed]):
        return CliRunner().invoke(app, typed)


def parquet(path: Path, windows: list[tuple[str, str, str]]) -> None:
    table = pd.DataFrame(windows, columns=["client_id", "begin", "until"])
    for name in ("begin", "until"):
        table[name] = pd.to_datetime(table[name]).dt.tz_localize("Europe/Oslo")
    table.to_parquet(path)


# A Norwegian log of a tram's link: Unix time, uptime, place, bytes since the line before, their ms.
HSDPA = """\
1284362654 549 59.85127 10.78193 125000 1000
1284362655 1549 59.85130 10.78190 500000 2000
1284362657 3549 59.85140 10.78170 0 1000
1284362658 4549 59.85150 10.78160 31250 500
"""
BATTERY = """\
ts,user,battery_status,battery_level
1717200000000,u1,charging,20
1717200600000,u1,charging,60
1717201200000,u1,full,100
1717201800000,u1,discharging,99
1717202400000,u1,discharging,95
"""
NODES = """\
hostname,cpu speed,downlink (Mbit/s),uplink (Mbit/s)
edge-1,1.5,100,20
edge-2,0.5,50,2.5
"""
MESSY = [
    ("a", "2024-06-01T08:00:00+02:00", "2024-06-01T09:00:00+02:00"),
    ("a", "2024-06-01T10:00:00+02:00", "2024-06-01T11:30:00+02:00"),
    ("a", "2024-06-01T08:30:00+02:00", "2024-06-01T09:30:00+02:00"),
    ("b", "2024-06-01T23:00:00+02:00", "2024-06-02T01:00:00+02:00"),
]
MESSY_WINDOWS = {
    "a": [[0, 1.5 * HOUR], [2 * HOUR, 3.5 * HOUR]],
    "b": [[15 * HOUR, 17 * HOUR]],
}


def delimited(separator: str, end: str = "\n", quote: str = "") -> str:
    lines = [("Device ID", "start", "end"), *MESSY]
    return "".join(separator.join(f"{quote}{c}{quote}" for c in line) + end for line in lines)


@pytest.mark.parametrize(
    ("content", "words", "expected", "epoch", "said"),
    [
        pytest.param(
            delimited(",", "\r\n", '"').encode("utf-8-sig"),
            ["--columns", "device=Device ID"],
            MESSY_WINDOWS,
            "08:00",
            ["utf-8-sig", "comma, guessed", "UTC+02:00, of the times", "merged: overlapping"],
            id="commas, quotes, CRLF and BOM",
        ),
        pytest.param(
            gzip.compress(delimited(";").encode()),
            ["--time-zone", "Europe/Oslo"],
            MESSY_WINDOWS,
            "08:00",
            ["semicolon, guessed", "Europe/Oslo, given", "sorted: out of order", "devices: 2"],
            id="semicolons, gzipped",
        ),
        pytest.param(
            delimited("\t").replace("+02:00", "").replace("T", " ").encode("utf-16"),
            ["--time-zone", "Europe/Oslo", "--kind", "windows"],
            MESSY_WINDOWS,
            "08:00",
            ["tab, guessed", "windows, given", "2024-06-01 to 2024-06-02, 2 days"],
            id="tabs, local times, UTF-16",
        ),
        pytest.param(
            b"wer|von|bis\nx|01/06/2024 10:00|01/06/2024 11:00\n",
            [
                *("--columns", "device=wer", "start=von", "end=bis"),
                *("--time-format", "%d/%m/%Y %H:%M", "--time-zone", "UTC"),
            ],
            {"x": [[0, HOUR]]},
            "10:00",
            ["'von', given", "%d/%m/%Y %H:%M, given"],
            id="day first, foreign names, bars",
        ),
        pytest.param(
            f"phone;time;online\np;{JUNE_UTC},5;1\np;{JUNE_UTC + 60},5;0\np;{JUNE_UTC + 120},5;1\n"
            f"p;{JUNE_UTC + 120},5;1\np;{JUNE_UTC + 180},5;0".encode(),
            ["--time-zone", "Europe/Oslo"],
            {"p": [[0.5, 60.5], [120.5, 180.5]]},
            "02:00",
            ["s since 1970, by the size", "samples, by its columns", "',', by the", "1 replaced: "],
            id="samples with decimal commas",
        ),
        pytest.param(
            BATTERY.encode(),
            ["--online-values", "charging,full", "--time-zone", "UTC"],
            {"u1": [[0.0, 1800.0]]},
            "00:00",
            ["battery, by its columns", "ms since 1970", "battery_level', by its name, not used"],
            id="battery",
        ),
        pytest.param(
            lambda path: parquet(path, [(d, s[:19], e[:19]) for d, s, e in MESSY]),
            [],
            MESSY_WINDOWS,
            "08:00",
            ["file: Parquet", "Europe/Oslo, of the times themselves", "'until', by its name"],
            id="Parquet of pandas",
        ),
    ],
)
def test_a_log_of_when_devices_are_online_becomes_traces(  # noqa: PLR0917 - a case
    tmp_path, content, words, expected, epoch, said
):
    log, out = tmp_path / "log.bin", tmp_path / "own.parquet"
    content(log) if callable(content) else log.write_bytes(content)
    result = convert(log, "--out", out, *words)
    assert result.exit_code == 0, result.output
    traces = TraceSet.read(out)
    assert traces.known == ("availability",)
    assert traces.epoch == f"2024-06-01T{epoch}:00"
    online = traces.availability
    found = {d: online.windows(k)[0].tolist() for k, d in enumerate(traces.device_ids)}
    assert found == expected
    for text in said:
        assert text in result.output


def test_bytes_of_intervals_become_rates_at_their_hours(tmp_path):
    log, out = tmp_path / "report.log", tmp_path / "own.parquet"
    log.write_text(HSDPA)
    words = ["--columns", "time=1 rate=5 interval=6", "--unit", "bytes/interval"]
    words += ["--unit", "interval=ms", "--time-zone", "Europe/Oslo", "--device", "tram"]
    result = convert(log, "--out", out, *words)
    assert result.exit_code == 0, result.output
    traces = TraceSet.read(out)
    assert list(traces.device_ids) == ["tram"]
    starts, rates, length = traces.downlink.segments(0)
    assert starts.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert rates.tolist() == [1e6, 2e6, 0.0, 5e5]
    assert length == 4.5
    # In Oslo, when the first interval begins.
    assert traces.epoch == "2010-09-13T09:24:13"
    assert traces.downlink.value_at([0, 0], [0.0, 1.5]).tolist() == [1e6, 2e6]
    for text in ("white space, guessed", "columns are called 1, 2", "in bytes/interval"):
        assert text in result.output


def test_a_list_of_nodes_becomes_constant_speeds_and_links(tmp_path):
    log, out = tmp_path / "nodes.csv", tmp_path / "own.parquet"
    log.write_text(NODES)
    words = ["--columns", "speed=cpu speed", "--compute-unit", "seconds of a Pi 4"]
    result = convert(log, "--out", out, *words)
    assert result.exit_code == 0, result.output
    traces = TraceSet.read(out)
    assert list(traces.device_ids) == ["edge-1", "edge-2"]
    assert traces.compute_unit == "seconds of a Pi 4"
    here = np.arange(2)
    assert traces.compute.value_at(here, 7.0).tolist() == [1.5, 0.5]
    assert traces.downlink.value_at(here, 7.0).tolist() == [100e6, 50e6]
    assert traces.uplink.value_at(here, 7.0).tolist() == [20e6, 2.5e6]
    assert "'hostname', by its name" in result.output
    assert "in Mbit/s" in result.output


def test_one_log_of_two_kinds_becomes_devices_with_their_own_links(tmp_path):
    log, out = tmp_path / "log.csv", tmp_path / "devices.parquet"
    rows = [f"p{k},{JUNE_UTC + 60 * t},1,{k + 1}.5" for k in range(3) for t in range(5)]
    log.write_text("\n".join(["phone,ts,online,rate_mbps", *rows, ""]))
    for kind in ("samples", "rates"):
        made = convert(log, "--kind", kind, "--out", tmp_path / f"{kind}.parquet")
        assert made.exit_code == 0, made.output
    phones, links = (TraceSet.read(tmp_path / f"{kind}.parquet") for kind in ("samples", "rates"))
    assert phones.device_ids.equals(links.device_ids)
    replace(phones, downlink=links.downlink).write(out)
    devices = TraceSet.read(out)
    now = devices.downlink.value_at(np.arange(3), np.full(3, 130.0))
    own = {"p0": 1.5e6, "p1": 2.5e6, "p2": 3.5e6}
    assert dict(zip(devices.device_ids, now.tolist(), strict=True)) == own


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(delimited(","))
    wet = convert(log, "--out", tmp_path / "own.parquet", "--json")
    (tmp_path / "own.parquet").unlink()
    dry = convert(log, "--dry-run", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    assert json.loads(dry.stdout) == {**json.loads(wet.stdout), "out": None}
    assert json.loads(dry.stdout)["understood"]["separator"] == "comma, guessed"


def test_a_last_line_that_was_cut_short_is_dropped_and_told(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("device,time,rate_kbps,cell\na,0,8,1\na,1,16,1\na,2,8,1\na,3,2")
    result = convert(log, "--unit", "s", "--out", tmp_path / "own.parquet")
    assert "1 dropped: last line, which was cut short" in result.output
    rates = TraceSet.read(tmp_path / "own.parquet").downlink.segments(0)[1]
    assert rates.tolist() == [8000.0, 16000.0]


@pytest.mark.parametrize(("end", "is_said"), [("", True), ("\n", False)])
def test_a_last_line_that_may_be_cut_is_told(tmp_path, end, is_said):
    log = tmp_path / "log.csv"
    log.write_text(f"device,start_s,end_s\na,5,7{end}")
    result = convert(log, "--dry-run")
    assert result.exit_code == 0, result.output
    assert ("last line: has no end" in result.output) is is_said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("log.csv", "device,start,end\na,1,2\n", ["describe"]),
        ("log.csv", "Timestamp,DL_bitrate\n1,2\n", ["describe"]),
        ("log.csv", "node,computation\na,2\n", ["describe"]),
        ("log.parquet", None, ["describe"]),
        ("log.parquet", None, ["merge", "--out", "x.parquet"]),
    ],
)
def test_refusals_of_foreign_logs_end_with_the_command(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is None:
        parquet(Path(name), [(d, s[:19], e[:19]) for d, s, e in MESSY])
    else:
        Path(name).write_text(content)
    result = CliRunner().invoke(app, ["traces", words[0], name, *words[1:]])
    assert result.exit_code == 2
    assert result.stderr.endswith("fedstale traces convert LOG --out NAME.parquet\n")


def test_a_simulation_on_a_foreign_log_ends_with_the_command(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(delimited(","))
    result = CliRunner().invoke(app, ["simulate", "digits", "--traces", str(log)])
    assert result.exit_code == 2
    assert result.stderr.endswith("fedstale traces convert LOG --out NAME.parquet\n")


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        ("device,start,end\na,5,2\n", ["--unit", "s"], "log.csv: line 2: end = '2': before"),
        ("device,start,end\n\na,x,7\n", ["--unit", "s"], "line 3: start = 'x'"),
        ("device,start,end\na,5,7,9\n", ["--unit", "s"], "line 2"),
        ("device,start,end\na,5,7\n", ["--separator", "::"], "separator = '::'"),
        ("device,start,end\na,5,7\nb,1,2,9\n", ["--unit", "s"], "line 3 has more than 3 cells"),
        ('device,start,end\n"a,5,7\n', ["--unit", "s"], "not a table"),
        ('"device,start,end\n', ["--unit", "s"], "one column in its first line"),
        (b"PAR1 and no more", ["--unit", "s"], "not a readable Parquet file"),
        (b"\0,1\n\0,2\n", [], "not a text"),
        ("one\n1\n", [], "expected several, with a separator"),
        ("device,start,end\na,5,7\n", ["--dry-run"], "which has none"),
        ("device,start,end\na,5,7\n", ["--kind", "flash", "--unit", "s"], "expected none with"),
        ("device,start,end\na,5,7\n", ["--columns", "phone"], "expected ROLE=COLUMN"),
        ("device,start,end\na,5,7\n", ["--max-gap", "long"], "max-gap = 'long'"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, content, words, expected):
    log = tmp_path / "log.csv"
    log.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = convert(log, "--out", tmp_path / "own.parquet", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "own.parquet").exists()


def test_a_second_file_is_the_one_to_write_and_a_third_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log.csv").write_text("phone,from_s,to_s\na,10,30\n")
    assert convert("log.csv", "own.parquet", "device=phone").exit_code == 0
    assert TraceSet.read(Path("own.parquet")).n_devices == 1
    assert convert("log.csv", "a.parquet", "b.parquet").exit_code == 2
    assert convert("log.csv", "a.parquet", "--out", "b.parquet").exit_code == 2


def read(*words: object) -> TraceSet:
    made = convert(*words, "--out", "own.parquet", "--overwrite")
    assert made.exit_code == 0, made.output
    return TraceSet.read(Path("own.parquet"))


def test_files_of_a_folder_or_several_are_each_of_the_device_of_their_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    Path("logs/u01.csv").write_text("start,end\n0,600\n3600,4200\n")
    Path("logs/u02.csv").write_text("start,end\n100,700\n")
    for words in (["logs"], ["logs/u01.csv", "logs/u02.csv"]):
        traces = read(*words, "--unit", "s")
        assert list(traces.device_ids) == ["u01", "u02"]
        assert traces.availability.windows(1)[0].tolist() == [[100, 700]]
    # A column of devices comes before the names of files, of whatever form they are.
    Path("logs/README.md").write_text("Of two phones.")
    Path("logs/u01.csv").write_bytes(b"start,end,Ger\xe4t\n0,600,p\n")
    Path("logs/u02.csv").write_bytes(
        gzip.compress(b'{"Ger\xc3\xa4t": "q", "start": 5, "end": 9}\n')
    )
    traces = read("logs", "device=Gerät", "--unit", "s")
    assert list(traces.device_ids) == ["p", "q"]
    Path("logs/u02.csv").unlink()
    Path("logs/u01.csv").write_text("start,end,phone\n0,6,p\n7,x,p\n")
    result = convert("logs", "--unit", "s", "--dry-run")
    assert "file u01, line 3: end = 'x': expected a number" in result.output


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\ndevice;time;online\na;0;1\na;60;0\n",
        "# of a phone\n# version 3\ndevice,time,online\na,0,1\na,60,0\n",
        "# device;time;online\na;0;1\na;60;0\n",
        "Report of June\n\ndevice,time,online\na,0,1\na,60,0\n",
        "device,time,online\na,0,1\ndevice,time,online\na,60,0\n",
        '{"device": "a", "time": 0, "online": true}\n{"device": "a", "time": 60, "online": 0}\n',
        '[{"device": "a", "time": 0, "online": 1}, {"device": "a", "time": 60, "online": 0}]',
        '{"logs": {"a": [{"time": 0, "online": "yes"}, {"time": 60, "online": "no"}]}}',
        "time=0 device=a online=on\ntime=60 device=a online=off\n",
        '{"device": ["a", "a"], "time": [0, 60], "online": [1, 0]}',
        '{"columns": ["time", "online"], "values": [[0, 1], [60, 0]]}',
        '{"a": [{"time": 0, "online": 1}, {"time": 60, "online": 0}], '
        '"b": [{"time": 0, "online": 0}]}',
    ],
)
def test_a_log_is_the_same_in_whatever_form_a_program_writes_it(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("a.log").write_text(content)
    more = [] if "device" in content or '"b"' in content else ["--device", "a"]
    traces = read("a.log", "--unit", "s", *more)
    assert list(traces.device_ids) == ["a"]
    assert traces.availability.windows(0)[0].tolist() == [[0, 60]]


def test_what_is_unclear_is_listed_above_the_command_to_type_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my log.csv").write_text("machine,login,logout\nm,6/1/2024 8:05,6/1/2024 9:05\n")
    result = convert("my log.csv", "--out", "own.parquet", "--max-gap", "9h")
    assert result.exit_code == 2
    *said, command = result.stderr.splitlines()
    assert len(said) == 4
    assert command == (
        "type next: fedstale traces convert 'my log.csv' --out own.parquet --max-gap 9h "
        "--time-format '%d/%m/%Y %H:%M' --time-zone UTC"
    )


def test_the_page_shows_what_the_command_asks(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/traces.md").read_text(encoding="utf-8")
    block = page.partition("$ fedstale traces convert ")[2].partition("```")[0]
    command, _, said = block.partition("\n")
    monkeypatch.chdir(tmp_path)
    times = ("2024-06-01 08:00:00,up", "2024-06-01 09:00:00,standby", "2024-06-01 10:00:00,up")
    Path("history.csv").write_text(
        "\n".join(["unit_id,changed_at,state", *(f"a,{t}" for t in times), ""])
    )
    result = convert(*command.split())
    assert result.stderr == said
    words = result.stderr.rpartition("convert ")[2].split()
    assert convert(*words).exit_code == 0
