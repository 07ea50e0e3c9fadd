"""Joules and grams of a run are those of a loop over its jobs, and each figure has a source."""

import json
import re
from math import inf, nan

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from typer.testing import CliRunner

import fedstale
from fedstale.cli.main import app
from fedstale.contrib.energy import Fleet, Intensity, Power, accounts, with_carbon, with_energy
from fedstale.contrib.energy.account import figure
from fedstale.contrib.energy.power import CLASSES, FIGURES
from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports import Run

HOURS = 6
END_S = HOURS * 3600.0
OWN = {
    "training_w": 10.0,
    "receiving_w": 2.0,
    "sending_w": 3.0,
    "network_j_per_byte": 0.5,
    "plug": 2.0,
}
FILE = "\n".join(f"{name} = {value}" for name, value in OWN.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of devices that go offline, which was cut off with jobs in flight."""
    out = tmp_path_factory.mktemp("energy") / "run"
    fedstale.simulate("digits", traces="synthetic:30", until="40m", out=out, seed=3)
    return Run(out)


def jobs_of(*rows):
    """Return a log of jobs (s down, training and up; bytes down and up) one after the other."""
    table = []
    for i, (down_s, train_s, up_s, down, up) in enumerate(rows):
        start = 100.0 * i
        ends = np.cumsum([start, down_s, train_s, up_s])
        table.append(
            {
                "device_id": f"d{i}",
                "outcome": "used",
                "started_at": start,
                "downloaded_at": ends[1],
                "trained_at": ends[2],
                "reported_at": ends[3],
                "ended_at": ends[3],
                "download_s": down_s,
                "compute_s": train_s,
                "upload_s": up_s,
                "downloaded_bytes": down,
                "uploaded_bytes": up,
            }
        )
    return pd.DataFrame(table)


def own(tmp_path, text=f"[mine]\n{FILE}\n"):
    """Write a file of powers, and read it."""
    path = tmp_path / "power.toml"
    path.write_text(text)
    return Power.read(path)


def intensity_of(tmp_path, text, **more):
    """Write a file of intensities, and read it."""
    path = tmp_path / "intensity.csv"
    path.write_text(text)
    return Intensity.read(path, **more)


def test_a_job_takes_what_is_worked_by_hand(tmp_path):
    fleet = Fleet("mine", own(tmp_path))
    jobs = with_energy(jobs_of((1.0, 20.0, 4.0, 6.0, 8.0)), fleet)
    # From the plug twice as much as in the device; the network as it is.
    assert jobs[["download_j", "training_j", "upload_j", "network_j"]].values.tolist() == [
        [2 * 2.0, 2 * 200.0, 2 * 12.0, 0.5 * 14.0]
    ]
    assert jobs["energy_j"].tolist() == [435.0]
    flat = intensity_of(tmp_path, "time,g_per_kwh\n0,360\n100,360\n")
    jobs = with_carbon(jobs, fleet, flat, end_s=200.0)
    # 360 g/kWh are 1e-4 g/J; the network is in the phase that moves its bytes.
    expected = [1e-4 * (4.0 + 3.0), 1e-4 * 400.0, 1e-4 * (24.0 + 4.0)]
    got = jobs[["download_g", "training_g", "upload_g"]].to_numpy()[0]
    assert got == pytest.approx(expected, rel=1e-12)
    assert jobs["carbon_g"].tolist() == pytest.approx([0.0435], rel=1e-12)


figures = st.integers(0, 10_000)
PHASE = (
    ("download_s", "downloaded_at", "downloaded_bytes"),
    ("compute_s", "trained_at", None),
    ("upload_s", "reported_at", "uploaded_bytes"),
)


@st.composite
def logs(draw):
    """Draw jobs that pause, some of which are cut in a phase, and some in flight at the end."""
    table = []
    for i in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, 3000))
        lost_in, is_in_flight = draw(st.integers(0, 3)), draw(st.booleans())
        outcome = "used" if lost_in == 3 else "in-flight" if is_in_flight else "wasted"
        row = {"device_id": f"d{i}", "outcome": outcome, "started_at": at, "ended_at": inf}
        for k, (phase, end, moved) in enumerate(PHASE):
            busy_s = draw(st.integers(0, 2000)) if k <= lost_in else 0
            at += busy_s + draw(st.integers(0, 500))
            row |= {phase: busy_s, end: at if k < lost_in else inf}
            if moved is not None:
                row[moved] = draw(st.integers(0, 10**9)) if busy_s else 0
            if k == min(lost_in, 2) and outcome != "in-flight":
                row["ended_at"] = at
        table.append(row)
    return pd.DataFrame(table)


@settings(max_examples=25)
@given(
    logs(),
    st.lists(st.tuples(*[figures] * 4, st.integers(1, 5)), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 900), min_size=HOURS, max_size=HOURS), min_size=2, max_size=2),
)
def test_joules_and_grams_are_those_of_a_loop(tmp_path_factory, jobs, powers, per_hour):
    folder = tmp_path_factory.mktemp("loop")
    names = ["training_w", "receiving_w", "sending_w", "network_j_per_byte", "plug"]
    power = {
        c: Power(**dict(zip(names, values, strict=True)))
        for c, values in zip("ab", powers, strict=True)
    }
    (folder / "fleet.csv").write_text(
        "device_id,class,region\n" + "".join(f"d{i},{'ab'[i % 2]},r{i % 2}\n" for i in range(9))
    )
    lines = [f"{3600 * hour},r{r},{g}\n" for r in (0, 1) for hour, g in enumerate(per_hour[r])]
    intensity = intensity_of(folder, "time,region,g_per_kwh\n" + "".join(lines))
    fleet = Fleet(folder / "fleet.csv", power)
    found = with_carbon(with_energy(jobs, fleet), fleet, intensity, end_s=END_S)
    for i, row in enumerate(found.to_dict("records")):
        training_w, receiving_w, sending_w, per_byte, plug = powers[i % 2]
        begin, joules, grams = row["started_at"], 0.0, 0.0
        for (phase, end, moved), watts in zip(
            PHASE, (receiving_w, training_w, sending_w), strict=True
        ):
            spent = plug * watts * row[phase] + (per_byte * row[moved] if moved else 0.0)
            ends = min(row[end], row["ended_at"], END_S)
            joules += spent
            if spent:
                # The phase's time in each hour.
                spans = [
                    max(min(ends, 3600.0 * (hour + 1)) - max(begin, 3600.0 * hour), 0.0)
                    for hour in range(HOURS)
                ]
                mean = np.dot(spans, per_hour[i % 2]) / sum(spans)
                grams += spent / 3.6e6 * mean
            begin = row[end]
        assert row["energy_j"] == pytest.approx(joules, rel=1e-9, abs=1e-9)
        assert row["carbon_g"] == pytest.approx(grams, rel=1e-9, abs=1e-9)


def test_used_wasted_and_in_flight_are_all_there_is(run):
    fleet = Fleet("phone")
    found = accounts(run, fleet, Intensity.synthetic())
    jobs = with_energy(run.jobs, fleet)
    assert set(jobs["outcome"]) == {"used", "wasted", "in-flight"}
    assert found.joules.to_numpy().sum() == pytest.approx(jobs["energy_j"].sum(), rel=1e-12)
    grams = with_carbon(jobs, fleet, Intensity.synthetic(), end_s=run.end_s)["carbon_g"]
    assert found.grams is not None
    assert found.grams.to_numpy().sum() == pytest.approx(grams.sum(), rel=1e-12)
    # Nothing is dirtier than the night of the synthetic day, nor cleaner than its noon.
    kwh = jobs["energy_j"].sum() / 3.6e6
    assert 200.0 * kwh <= grams.sum() <= 480.0 * kwh


def test_half_and_double_are_what_a_file_with_them_gives(run, tmp_path):
    found = accounts(run, Fleet("mine", own(tmp_path)))
    base = found.joules.to_numpy().sum()
    for row in found.assumptions.to_dict("records"):
        for way, factor in (("half", 0.5), ("double", 2.0)):
            figures = OWN | {row["figure"]: max(OWN[row["figure"]] * factor, 0.0)}
            text = "[mine]\n" + "\n".join(f"{name} = {x}" for name, x in figures.items())
            other = accounts(run, Fleet("mine", own(tmp_path, text))).joules.to_numpy().sum()
            assert row[way] == pytest.approx(other / base - 1.0, abs=1e-12), row
    assert found.assumptions["source"].tolist() == ["your own"] * 5


def test_a_plug_gives_no_less_than_what_arrives(run):
    rows = accounts(run, Fleet("board")).assumptions.set_index("figure")
    # Half of 1.2 would be less than 1; doubled it is the share of the devices.
    assert -0.17 < rows.loc["plug", "half"] < 0.0


def test_a_run_without_energy_has_accounts_too(run, monkeypatch):
    monkeypatch.setattr(run, "jobs", run.jobs.head(0))
    found = accounts(run, Fleet("phone"), Intensity.synthetic())
    assert found.joules.to_numpy().tolist() == [[0.0] * 3] * 4
    assert found.assumptions["half"].tolist() == [0.0] * 5


def test_figures_that_come_with_fedstale_have_sources():
    for name, power in Power.read().items():
        assert set(power.sources) == set(FIGURES), name
        assert all(len(source) > 10 for source in power.sources.values())
    assert CLASSES.name == "classes.toml"


def test_the_page_has_the_figures_that_come_with_fedstale():
    page = (ROOT / "docs" / "contrib" / "energy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    found = {name: [float(x) for x in figures.split(" | ")] for name, figures in rows}
    assert found == {
        name: [getattr(power, each) for each in FIGURES] for name, power in Power.read().items()
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mine]\ntraining_w = 1\n", "has no receiving_w, sending_w, network_j_per_byte, plug"),
        (f"[mine]\n{FILE}\nidle_w = 3\n", "has idle_w: expected training_w"),
        (f"[mine]\n{FILE}\n".replace("10.0", "-1.0"), "training_w = -1.0: expected a finite"),
        (f"[mine]\n{FILE}\n".replace("10.0", "nan"), "training_w = nan: expected a finite"),
        (f"[mine]\n{FILE}\n".replace("10.0", "true"), "training_w = True: expected a number"),
        (f"[mine]\n{FILE}\n".replace("10.0", '"5 W"'), "training_w = '5 W': expected a number"),
        (f"[mine]\n{FILE}\n".replace("plug = 2.0", "plug = 0.9"), "plug = 0.9: expected a finite"),
        (f'[mine]\n{FILE}\nsources = "a book"\n', "sources = 'a book': expected a table"),
        ("mine = 3\n", "expected a table"),
        ("mine = [", "cannot be read"),
    ],
)
def test_a_file_of_powers_that_is_wrong_is_refused(tmp_path, text, said):
    with pytest.raises(ConfigError) as problem:
        own(tmp_path, text)
    assert said in str(problem.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected a class (phone, desktop, board) or a CSV"),
        ("device_id,kind\na,phone\n", "has no column class"),
        ("device_id,class\na,phone\na,board\n", "has 'a' twice"),
        ("device_id,class\na,phones\n", "has the class 'phones': expected one of phone"),
    ],
)
def test_a_file_of_devices_that_is_wrong_is_refused(tmp_path, text, said):
    path = tmp_path / "fleet.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as problem:
        Fleet(path)
    assert said in str(problem.value)


def test_devices_that_a_file_leaves_out_are_named(tmp_path):
    path = tmp_path / "fleet.csv"
    path.write_text("device_id,class\nd0,phone\n")
    with pytest.raises(ConfigError, match=r"has no 'd1': .* 1 are missing"):
        with_energy(jobs_of((1.0, 1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0, 0.0)), Fleet(path))


def test_devices_whose_names_are_numbers_are_found(tmp_path):
    path = tmp_path / "fleet.csv"
    path.write_text("device_id,class\n007,phone\n")
    jobs = jobs_of((1.0, 1.0, 1.0, 0.0, 0.0)).assign(device_id="007")
    assert with_energy(jobs, Fleet(path))["training_j"].tolist() == [5.0 * 2.9]


def test_joules_of_jobs_whose_seconds_or_bytes_nobody_knows_are_refused():
    jobs = jobs_of(np.ones(5), *np.where(np.eye(5), nan, 1.0))
    with pytest.raises(ConfigError, match="of 5 of 6 jobs the seconds or bytes are not known"):
        with_energy(jobs, Fleet("phone"))


def test_dates_count_from_the_epoch_whatever_their_zone(tmp_path):
    text = "time,g_per_kwh\n2026-03-01T01:00+01:00,100\n2026-03-01T02:00+01:00,300\n"
    with pytest.raises(ConfigError, match="has dates: expected --epoch"):
        intensity_of(tmp_path, text)
    fleet = Fleet("mine", own(tmp_path))
    jobs = with_energy(jobs_of((0.0, 3600.0, 0.0, 0.0, 0.0)), fleet)
    # The hour from half past: half of it at 100, half at 300.
    found = intensity_of(tmp_path, text, epoch="2026-03-01T00:30Z")
    grams = with_carbon(jobs, fleet, found, end_s=1e9)["carbon_g"]
    assert grams.tolist() == pytest.approx([72_000.0 / 3.6e6 * 200.0], rel=1e-9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("when,g_per_kwh\n0,1\n", "has no column time"),
        ("time,g_per_kwh\n0,1\n", "expected two times or more"),
        ("time,g_per_kwh\n3600,1\n0,1\n", "each after the last"),
        ("time,g_per_kwh\n10,1\n20,1\n", "is of 10 to 30 s of the run: expected instant 0 in it"),
        ("time,g_per_kwh\n-20,1\n-10,1\n", "is of -20 to 0 s of the run"),
        ("time,g_per_kwh\n0,-1\n10,1\n", "rate -1.0 at position 0: expected a finite number >= 0"),
        ("time,g_per_kwh\n0,much\n10,1\n", "g_per_kwh is no column of numbers"),
        ("time,g_per_kwh\n0,\n10,1\n", "rate nan at position 0"),
        ("time,g_per_kwh\n", "g_per_kwh is no column of numbers"),
        ("time,g_per_kwh\nnoon,1\nnight,1\n", "neither s nor dates"),
    ],
)
def test_a_file_of_intensities_that_is_wrong_is_refused(tmp_path, text, said):
    with pytest.raises(ConfigError) as problem:
        intensity_of(tmp_path, text)
    assert said in str(problem.value)


def test_intensities_are_those_of_the_hour_and_unknown_beyond_the_end(tmp_path):
    found = intensity_of(tmp_path, "time,region,g_per_kwh\n0,b,1\n50,b,2\n0,a,3\n50,a,4\n")
    assert found.regions == ("a", "b")
    np.testing.assert_equal(
        found.at(np.array([0.0, 49.0, 50.0, 99.0, 100.0])),
        [[3.0, 3.0, 4.0, 4.0, nan], [1.0, 1.0, 2.0, 2.0, nan]],
    )


def test_an_intensity_that_ends_before_the_run_is_refused(tmp_path):
    fleet = Fleet("phone")
    jobs = with_energy(jobs_of((0.0, 50.0, 0.0, 0.0, 0.0)), fleet)
    found = intensity_of(tmp_path, "time,g_per_kwh\n0,1\n20,1\n")
    with pytest.raises(ConfigError, match="ends at 40 s of the run, and a job at 50 s"):
        with_carbon(jobs, fleet, found, end_s=1e9)


def test_a_region_that_is_not_known_is_refused(tmp_path):
    found = intensity_of(tmp_path, "time,region,g_per_kwh\n0,eu,1\n90,eu,1\n0,us,2\n90,us,2\n")
    jobs = jobs_of((0.0, 36.0, 0.0, 0.0, 0.0))
    for region, said in (("asia", "region = 'asia': expected one of eu, us"), (None, "None")):
        fleet = Fleet("phone", region=region)
        with pytest.raises(ConfigError, match=said):
            with_carbon(with_energy(jobs, fleet), fleet, found, end_s=1e9)
    alone = intensity_of(tmp_path, "time,region,g_per_kwh\n0,eu,1\n90,eu,1\n")
    fleet = Fleet("phone", region="us")
    with pytest.raises(ConfigError, match="region = 'us': expected one of eu"):
        with_carbon(with_energy(jobs, fleet), fleet, alone, end_s=1e9)
    grams = with_carbon(with_energy(jobs, fleet), fleet, found, end_s=1e9)["carbon_g"]
    assert grams.tolist() == pytest.approx([5.0 * 36.0 * 2.9 / 3.6e6 * 2.0])


def test_the_command_says_where_energy_went_and_the_report_shows_it(run):
    path = run.folder / "energy.json"
    assert figure(run) is None
    words = ["energy", str(run.folder), "--devices", "phone"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert "AnandTech" in said.output
    shown = figure(run)
    assert shown is not None
    assert "CO2" not in shown.about
    said = CliRunner().invoke(app, [*words, "--intensity", "synthetic", "--json"])
    found = json.loads(said.stdout)
    assert found["out"] == str(path)
    assert found["joules"] == json.loads(path.read_text())["joules"]
    shown = figure(run)
    assert shown is not None
    assert "CO2" in shown.about
    page = run.folder / "energy.html"
    made = CliRunner().invoke(app, ["report", str(run.folder), "--out", str(page)])
    assert made.exit_code == 0, made.output
    assert "Where energy went" in page.read_text()
    path.write_text("{}")
    with pytest.raises(ProtocolError, match="fedstale energy writes it"):
        figure(run)
    path.unlink()


def test_devices_of_ones_own_classes_in_two_regions(run, tmp_path):
    (tmp_path / "camera.toml").write_text(f"[camera]\n{FILE}\n")
    ids = sorted(set(run.jobs["device_id"]))
    places = [f"{name},{('camera,eu', 'desktop,us')[i % 2]}" for i, name in enumerate(ids)]
    (tmp_path / "fleet.csv").write_text("device_id,class,region\n" + "\n".join(places))
    hours = [f"2026-03-01T0{h}:00Z,{r},{g}" for r, g in (("eu", 0), ("us", 360)) for h in (0, 1)]
    (tmp_path / "grid.csv").write_text("time,region,g_per_kwh\n" + "\n".join(hours))
    words = ["energy", str(run.folder), "--devices", str(tmp_path / "fleet.csv"), "--json"]
    words += ["--power", str(tmp_path / "camera.toml"), "--intensity", str(tmp_path / "grid.csv")]
    said = CliRunner().invoke(app, [*words, "--epoch", "2026-03-01T00:00Z"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert {row["class"] for row in found["assumptions"]} == {"camera", "desktop"}
    grams = sum(x for part in found["grams"].values() for x in part.values())
    jobs = with_energy(
        run.jobs, Fleet(tmp_path / "fleet.csv", Power.read(tmp_path / "camera.toml"))
    )
    # Where power is free of carbon, nothing counts.
    dirty = jobs[jobs["device_id"].isin(ids[1::2])]
    assert grams == pytest.approx(dirty["energy_j"].sum() / 3.6e6 * 360.0, rel=1e-9)
    (run.folder / "energy.json").unlink()


def test_what_the_command_cannot_know_is_one_sentence(run):
    said = CliRunner().invoke(app, ["energy", str(run.folder), "--devices", "phones"])
    assert said.exit_code == 2
    assert "expected a class" in said.stderr
