"""`fedstale traces compose` and `merge` on published recordings, which take seconds to read."""

import numpy as np
import pytest
from places import RECORDINGS
from typer.testing import CliRunner

from fedstale.cli.traces import app
from fedstale.traces import TraceSet

UNIT = "seconds of the median phone of the ranking, all of its processor"


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_published_desktops_and_cars_are_composed_as_the_page_says(tmp_path):
    if not RECORDINGS.is_dir():
        pytest.skip("published recordings are not here")
    load = ("--background", RECORDINGS / "planetlab-cpu.tar.gz", "--days", 3)
    stated = ("--speed", 3, "--compute-unit", UNIT, "--link-capacity", "100M,100M")
    recorded = ("--compute", RECORDINGS / "ai-benchmark-devices.json", "--uplink-share", 0.2)
    recorded += ("--network", RECORDINGS / "uccmisl-5g.zip")
    kinds = {
        "desktops": (RECORDINGS / "library-desktops", 200, stated),
        "cars": (RECORDINGS / "ev-norway-charging-reports.csv.xz", 150, recorded),
    }
    for name, (online, n, others) in kinds.items():
        words = ("--availability", online, *others, *load, "--n", n)
        result = run("compose", *words, "--out", tmp_path / f"{name}.parquet")
        assert result.exit_code == 0, result.output
    files = [tmp_path / f"{name}.parquet" for name in kinds]
    result = run("merge", *files, "--align", "time-of-week", "--out", tmp_path / "mixed.parquet")
    assert result.exit_code == 0, result.output
    mixed, cars = TraceSet.read(tmp_path / "mixed.parquet"), TraceSet.read(files[1])
    assert mixed.n_devices == 350
    # Desktops were logged for more than a year, and only a part of it each.
    logged = np.minimum(mixed.availability.logs_s, mixed.availability.lengths)
    assert (mixed.availability.record_s()[:200] == 518 * 86_400.0).all()
    assert 0.5 < (logged[mixed.availability.rows] / mixed.availability.record_s())[:200].mean() < 1
    instants = np.random.default_rng(0).random(200) * 7 * 86_400.0
    for i in (0, 70, 149):
        device = mixed.position(cars.device_ids[i])
        own, here = np.full(200, i), np.full(200, device)
        for name in ("compute", "downlink", "uplink"):
            a, b = getattr(mixed, name), getattr(cars, name)
            assert (a.value_at(here, instants) == b.value_at(own, instants)).all()
        alike = mixed.availability.is_available(here, instants)
        assert (alike == cars.availability.is_available(own, instants)).all()
