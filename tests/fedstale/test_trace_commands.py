"""The commands `fedstale traces ...` do what they say, or say in one sentence why not."""

import http.server
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from loopback import Loopback
from typer.testing import CliRunner

from fedstale.cli.traces import app
from fedstale.traces import TraceSet
from fedstale.traces.forecast import forecaster_folder
from fedstale.traces.forecast.base import FLEETS
from fedstale.traces.sources import SOURCES
from fedstale.traces.synthetic.population import PRESETS


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def sources(tmp_path):
    """Return a folder of tiny recordings in their authors' formats."""
    hour = 3600
    phones = {f"p{i}": [[i * hour + 60, (i + 2) * hour]] for i in range(20)}
    (tmp_path / "phones.json").write_text(json.dumps(phones))
    models = [{"Model": f"m{i}", "CPU_F_AI_Score": str(100 * (i + 1))} for i in range(4)]
    (tmp_path / "models.json").write_text(json.dumps(models))
    links = tmp_path / "links"
    links.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        for side in ("up", "down"):
            ms = np.sort(rng.integers(1, 120_000, 6000))
            (links / f"{name}.{side}").write_text("\n".join(map(str, ms)) + "\n")
    day = tmp_path / "load" / "20110303"
    day.mkdir(parents=True)
    for host in ("h1", "h2", "h3"):
        (day / host).write_text("\n".join(map(str, rng.integers(0, 100, 288))))
    return tmp_path


def parts_of(sources: Path) -> list[object]:
    return [
        *("--availability", sources / "phones.json"),
        *("--compute", sources / "models.json"),
        *("--background", sources / "load"),
        *("--network", sources / "links"),
    ]


def test_describe_prints_counts_and_hours_of_generated_devices():
    result = run("describe", "synthetic:8")
    assert result.exit_code == 0
    assert "8 devices" in result.stdout
    assert "online by the hour" in result.stdout
    assert "downlink" in result.stdout


def test_describe_as_json_is_json_and_nothing_else():
    numbers = json.loads(run("describe", "synthetic:8", "--json").stdout)
    assert numbers["n_devices"] == 8
    assert len(numbers["hourly"]) == 24
    rates = list(numbers["quantiles"]["downlink, Mbit/s"].values())
    assert rates == sorted(rates)


def test_describe_knows_devices_that_take_no_time():
    assert re.search(r"uplink, Mbit/s +inf", run("describe", "ideal:3").stdout)
    numbers = json.loads(
        run("describe", "ideal:3", "--json").stdout,
        parse_constant=lambda word: pytest.fail(f"{word} is no JSON"),
    )
    assert numbers["n_devices"] == 3
    assert list(numbers["quantiles"]["compute, units/s"].values()) == [None] * 5
    assert list(numbers["quantiles"]["share of time online"].values()) == [1.0] * 5


def test_describe_shows_what_a_reader_repaired(sources):
    data = json.loads((sources / "phones.json").read_text())
    data["p0"].append([500, 400])
    (sources / "phones.json").write_text(json.dumps(data))
    result = run("describe", sources / "phones.json")
    assert "dropped: end before start" in result.stdout
    assert "known: availability;" in result.stdout


def test_converted_recordings_are_the_same_traces(sources):
    out = sources / "phones.parquet"
    assert run("convert", sources / "phones.json", "--out", out).exit_code == 0
    back = TraceSet.load(str(out), seed=0)
    original = TraceSet.load(str(sources / "phones.json"), seed=0)
    assert list(back.device_ids) == list(original.device_ids)
    np.testing.assert_array_equal(back.availability.starts, original.availability.starts)


def test_composed_devices_are_written_whole_and_reproducibly(sources):
    words = ["compose", *parts_of(sources), "--n", 30, "--seed", 4, "--out"]
    for name in ("one.parquet", "two.parquet"):
        result = run(*words, sources / name)
        assert result.exit_code == 0, result.output
    assert (sources / "one.parquet").read_bytes() == (sources / "two.parquet").read_bytes()
    traces = TraceSet.read(sources / "one.parquet")
    assert traces.n_devices == 30
    traces.complete()


@pytest.fixture
def kinds(sources):
    """Return the sources with desktops and cars in their authors' formats beside them."""
    lines, sessions = [], []
    for device in range(4):
        for k, day in enumerate(pd.date_range("2016-02-01", periods=21)):
            morning, evening = (day + pd.Timedelta(hours=h, seconds=k) for h in (8, 18))
            lines.append(f"D{device},in-use,{morning:%Y-%m-%d %H:%M:%S}.000")
            lines.append(f"D{device},available,{evening:%Y-%m-%d %H:%M:%S}.000")
            sessions.append(f"C{device};{evening};{morning + pd.Timedelta(days=1)}")
    (sources / "FullLogonData-001.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    header = "user_id;plugin_time;plugout_time"
    (sources / "cars.csv").write_text("\n".join([header, *sessions]))
    for day in ("20110306", "20110309"):
        (sources / "load" / day).mkdir()
        for host in ("h1", "h2", "h3"):
            text = (sources / "load" / "20110303" / host).read_text()
            (sources / "load" / day / host).write_text("\n".join(reversed(text.splitlines())))
    return sources


UNIT = "seconds of the median phone of the ranking, all of its processor"


def test_a_fleet_of_desktops_cars_and_phones_is_composed_and_merged_by_commands(kinds):
    load = ("--background", kinds / "load", "--days", 3, "--seed", 1)
    stated = ("--compute", f"3 {UNIT}", "--network", "100M,20M")
    recorded = ("--compute", kinds / "models.json", "--network", kinds / "links")
    for name, online, others in (
        ("desktops", "FullLogonData-001.csv", stated),
        ("cars", "cars.csv", recorded),
        ("phones", "phones.json", recorded),
    ):
        words = ("--availability", kinds / online, *others, *load, "--n", 4)
        result = run("compose", *words, "--out", kinds / f"{name}.parquet")
        assert result.exit_code == 0, result.output
    desktops = TraceSet.read(kinds / "desktops.parquet")
    same = TraceSet.compose(
        availability=TraceSet.read(kinds / "FullLogonData-001.csv"),
        compute=replace(
            TraceSet.constant(1, compute=3.0, downlink_bit_per_s=100e6, uplink_bit_per_s=20e6),
            compute_unit=UNIT,
        ),
        background=TraceSet.read(kinds / "load"),
        network=TraceSet.constant(1, compute=3.0, downlink_bit_per_s=100e6, uplink_bit_per_s=20e6),
        n=4,
        seed=1,
        days=3,
    )
    assert list(desktops.device_ids) == list(same.device_ids)
    instants = np.linspace(0.0, 21 * 86_400.0, 500)
    for device in range(4):
        here = np.full(500, device)
        assert set(desktops.downlink.value_at(here, instants)) == {100e6}
        assert set(desktops.uplink.value_at(here, instants)) == {20e6}
        np.testing.assert_array_equal(
            desktops.compute.value_at(here, instants), same.compute.value_at(here, instants)
        )
        np.testing.assert_array_equal(
            desktops.availability.is_available(here, instants),
            same.availability.is_available(here, instants),
        )
    files = [kinds / f"{name}.parquet" for name in ("desktops", "cars", "phones")]
    result = run("merge", *files, "--align", "time-of-week", "--out", kinds / "mixed.parquet")
    assert result.exit_code == 0, result.output
    mixed = TraceSet.load(str(kinds / "mixed.parquet"), seed=0)
    assert mixed.n_devices == 12
    mixed.complete()
    # The log of a car is a whole week, that of a desktop ends within one.
    car, desktop = mixed.device_ids.get_loc("C0"), mixed.device_ids.get_loc("D0")
    assert mixed.availability.logs_s[[car, desktop]].tolist() != [np.inf, np.inf]
    night = mixed.availability.is_available([car, desktop], [4 * 86_400.0 + 3600.0] * 2)
    assert night.tolist() == [True, True]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--compute", "3 u"), "Missing option '--network'"),
        (("--network", "9M,9M"), "Missing option '--compute'"),
        (("--compute", "3 u", "--network", "9,8,7"), "expected DOWN,UP in bit/s"),
        (("--compute", "3", "--network", "9M,9M"), "3: no such file"),
        (("--compute", "3 u", "--network", "9M"), "9M"),
    ],
)
def test_what_was_neither_recorded_nor_stated_is_named(kinds, words, expected):
    out = kinds / "d.parquet"
    result = run("compose", "--availability", kinds / "cars.csv", *words, "--n", 2, "--out", out)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not out.exists()


def test_generated_devices_are_those_of_the_library(tmp_path):
    out = tmp_path / "d.parquet"
    assert run("convert", "synthetic:6@desktops", "--seed", 3, "--out", out).exit_code == 0
    wanted = TraceSet.synthetic(6, seed=3, population="desktops")
    back = TraceSet.read(out)
    np.testing.assert_array_equal(back.availability.starts, wanted.availability.starts)
    np.testing.assert_array_equal(back.compute.scales, wanted.compute.scales)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("describe", "nowhere.json"), "no such file or folder"),
        (("describe", "synthetic:0"), "expected synthetic:N"),
        (("describe", "synthetic:many"), "expected synthetic:N"),
        (("convert", "nowhere.json", "out.parquet"), "no such file or folder"),
        (("convert", "synthetic:2", "--out", "no/folder/d.parquet"), "does not exist"),
        (("convert", "synthetic:2@cars", "--out", "d.parquet"), "no population 'cars'"),
        (("convert", "synthetic:2", "--unit", "s", "--out", "d.parquet"), "expected none with"),
        (("fetch", "unheard-of"), "expected one of flash"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(
    tmp_path, monkeypatch, words, expected
):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("fedstale: ")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_unless_asked(tmp_path):
    out = tmp_path / "d.parquet"
    out.write_text("precious")
    result = run("convert", "synthetic:2", "--out", out)
    assert (result.exit_code, out.read_text()) == (2, "precious")
    assert "--overwrite" in result.stderr
    assert run("convert", "synthetic:2", "--out", out, "--overwrite").exit_code == 0
    assert TraceSet.read(out).n_devices == 2


def test_a_missing_uplink_is_named_and_nothing_is_written(sources):
    for up in (sources / "links").glob("*.up"):
        up.unlink()
    out = sources / "d.parquet"
    result = run("compose", *parts_of(sources), "--n", 3, "--out", out)
    assert result.exit_code == 2
    assert "uplink_share" in result.stderr
    assert not out.exists()
    words = ("compose", *parts_of(sources), "--n", 3, "--out", out, "--uplink-share", 0.5)
    assert run(*words).exit_code == 0


def test_what_comes_by_name_has_a_card_of_what_it_is_its_licence_and_size():
    told = run("list", "--json")
    assert told.exit_code == 0, told.output
    found = {card["name"]: card for card in json.loads(told.stdout)}
    shipped = {name: card for name, card in found.items() if name not in SOURCES}
    fleets = ["", *(f"@{fleet}" for fleet in PRESETS if fleet != "phones")]
    names = [f"synthetic:N{fleet}" for fleet in fleets]
    names += ["embedded", *(f"embedded:{fleet}" for fleet in FLEETS[1:]), "AgentSelector()"]
    assert list(found) == [*SOURCES, *names]
    for name, card in shipped.items():
        source, _, learnt = card["licence"].partition("; learnt from ")
        assert source == "Apache-2.0"
        assert set(learnt.split(", ")) <= set(SOURCES)
        assert name in card["use"] or card["kind"] == "forecasters"
        assert card["bytes"] > 7000
        if name.startswith("synthetic"):
            assert TraceSet.load(name.replace("N", "3"), seed=0).n_devices == 3
        if name.startswith("embedded"):
            assert forecaster_folder(name).is_dir()
    assert found["mahimahi"]["bytes"] > 7e6
    assert found["flash"]["bytes"] is None
    shown = run("list").stdout
    cells = [card[key] for card in found.values() for key in ("name", "about", "use", "licence")]
    assert all(cell in shown for cell in cells)
    assert "0.21 MB" in shown


def test_fetch_downloads_from_a_server_and_prints_licence_and_path(tmp_path):
    served = tmp_path / "served"
    served.mkdir()
    (served / "ready_strict.json").write_text('{"p": [[0, 60]]}')
    handler = partial(QuietHandler, directory=str(served))
    with Loopback().installed() as here, here.http(handler) as port:
        url = f"http://127.0.0.1:{port}/ready_strict.json"
        result = run("fetch", "flash", "--folder", tmp_path / "got", "--url", url)
    assert result.exit_code == 0, result.output
    assert "licence: BSD-2-Clause" in result.stderr
    assert Path(result.stdout.strip()).read_text() == '{"p": [[0, 60]]}'


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
