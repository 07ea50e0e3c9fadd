"""Measures of unevenness are what follows by hand on small fleets, and what a fleet played says."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.contrib.formats import measures, unevenness
from fedstale.contrib.formats.measures import gini, logs_of, top_share, windows_between
from fedstale.traces import Availability, Series, TraceSet


def fleet(n, **channels):
    return TraceSet(device_ids=pd.Index([f"d{i}" for i in range(n)], dtype="str"), **channels)


@pytest.fixture
def short(monkeypatch):
    """Play few rounds."""
    monkeypatch.setattr(measures, "ROUNDS", 30)
    monkeypatch.setattr(measures, "JOBS", 100)


def test_gini_and_top_share_by_hand():
    # All pairs of 1, 2, 5: differences 1 + 3 + 4, over n^2 times the mean: 8 / (9 * 8 / 3).
    assert gini(np.array([5.0, 1.0, 2.0])) == pytest.approx(8 / 24)
    assert gini(np.ones(7)) == 0.0
    assert np.isnan(gini(np.zeros(3)))
    # The top 1.2 of four: 6 and a fifth of 2, of 10.
    assert top_share(np.array([1.0, 6.0, 2.0, 1.0])) == pytest.approx(0.64)
    assert top_share(np.ones(10)) == pytest.approx(0.3)
    assert np.isnan(top_share(np.zeros(3)))


def test_time_online_is_of_the_time_that_was_logged(short):
    # Logged from 50 s on, through the end, for 100 s: online for 30 of them, and 20 in a gap.
    one = Availability.of([[(0.0, 20.0), (60.0, 70.0), (300.0, 310.0)]], 400.0, logs=(360.0, 100.0))
    one = one.with_gaps(np.array([70.0]), np.array([90.0]), [1])
    begin, end, known = logs_of(one)
    assert (begin.tolist(), end.tolist(), known.tolist()) == ([360.0], [460.0], [80.0])
    assert windows_between(one, begin, end)[0].tolist() == [[400.0, 420.0]]
    other = Availability.of([[(0.0, 400.0)]], 400.0)
    found = unevenness(fleet(2, availability=Availability.joined([one, other])))
    # Shares 20 / 80 and 1: the top 0.6 device has 0.6 of 1.25.
    assert found["top 30 % of time online"] == pytest.approx(0.6 / 1.25)
    assert found["Gini of time online"] == pytest.approx(0.75 / (2 * 1.25))


def test_a_cut_or_shifted_log_is_counted_where_it_is():
    online = Availability.of([[(10.0, 30.0)], [(50.0, 90.0)]], 100.0)
    cut = online.between(20.0, 75.0)
    for each in (cut, replace(cut, repeat=False)):
        begin, end, known = logs_of(each)
        windows = windows_between(each, begin, end)
        assert [one.tolist() for one in windows] == [[[0.0, 10.0]], [[30.0, 55.0]]]
        assert (begin.tolist(), known.tolist()) == ([0.0, 0.0], [55.0, 55.0])
    begin, end, known = logs_of(online.shifted(20.0))
    assert (begin.tolist(), end.tolist(), known.tolist()) == ([80.0] * 2, [180.0] * 2, [100.0] * 2)


def test_links_of_two_speeds_by_hand(short):
    # 1 MB each way: two devices take 2 s, two 400 s, which is later than 120 s.
    link = Series.constant([8e6, 8e6, 4e4, 4e4])
    found = unevenness(fleet(4, downlink=link), model_bytes=1_000_000)
    # All four are asked in each round, so the two fast ones report in all of 30 rounds.
    assert found["DevMC-R"] == pytest.approx(np.log(61) / np.log(121))
    # 25 rounds of 4 jobs, each 20 s and the .8 quantile of 2, 2, 400, 400; over 100 pauses / 20.
    assert found["DevMC-T"] == pytest.approx(25 * (20 + 400) / 100)
    assert found["top 30 % of jobs in time"] == pytest.approx(0.6)
    assert found.keys() == {"DevMC-R", "DevMC-T", "top 30 % of jobs in time"}
    slow_up = unevenness(
        fleet(4, downlink=link, uplink=link.scaled(0.01 * np.ones(4))), deadline_s=130
    )
    assert slow_up["DevMC-R"] == 0.0


def test_when_devices_are_ready_by_hand(short):
    # One is there in the first 60 s of 100 s, one always; a job of 10 s or more waits for it.
    online = Availability.of([[(0.0, 60.0)], [(0.0, 100.0)]], 100.0)
    found = unevenness(fleet(2, availability=online), deadline_s=50)
    scores, ends = [], []
    for cost_s in range(0, 250, 10):
        for whole in (False, True):
            t, jobs, done = 0.0, [0, 0], 0
            while done < (100 if whole else 30):
                t += 20.0
                asked = [1] if t % 100 >= 60 else [0, 1]
                took = [cost_s] * len(asked)
                if len(asked) == 2 and cost_s:
                    # After its first stretch it is away 40 s before each further 60 s.
                    left = 60 - t % 100
                    took[0] = cost_s + 40 * int(np.ceil(max(cost_s - left, 0) / 60))
                done += len(asked) if whole else 1
                for device, s in zip(asked, took, strict=True):
                    jobs[device] += s <= 50
                t += np.quantile(took, 0.8) if whole else min(max(took), 50)
            if whole:
                ends.append(t / 100)
            elif 0 < cost_s <= 50:
                scores.append(np.log1p(sum(jobs)) / np.log1p(60))
    assert found["StatMC-R"] == pytest.approx(np.mean(scores))
    assert found["StatMC-T"] == pytest.approx(np.mean(ends))


def test_a_device_counts_for_its_share_of_all_draws_at_most(short):
    # Twenty of forty always come, and report in all of 30 rounds; the share of each is 15.
    online = Availability.of([[(0.0, 100.0)]] * 20 + [np.empty((0, 2))] * 20, 100.0)
    found = unevenness(fleet(40, availability=online))
    assert found["StatMC-R"] == pytest.approx(np.log(20 * 15 + 1) / np.log(40 * 15 + 1))


def test_both_together_are_worse_than_each(short):
    online = Availability.of([[(0.0, 30.0 + 3 * k)] for k in range(30)], 200.0)
    link = Series.constant(np.geomspace(1e5, 1e7, 30))
    found = unevenness(fleet(30, availability=online, downlink=link), model_bytes=10**7)
    assert found["InterMC-R"] < min(found["DevMC-R"], found["StatMC-R"])
    assert found["InterMC-T"] > found["DevMC-T"]


def test_nobody_ever_comes(short):
    found = unevenness(fleet(3, availability=Availability.of([np.empty((0, 2))] * 3, 100.0)))
    assert found["StatMC-R"] == 0.0
    assert found["StatMC-T"] == np.inf
    assert np.isnan(found["Gini of time online"])


def test_more_uneven_devices_have_larger_figures_and_draws_follow_the_seed(short):
    even, uneven = (
        fleet(40, compute=Series.constant(np.linspace(1, most, 40))) for most in (2.0, 9.0)
    )
    assert unevenness(even)["Gini of speeds"] < unevenness(uneven)["Gini of speeds"]
    phones = TraceSet.synthetic(40, seed=0, days=2)
    assert unevenness(phones, seed=1) == unevenness(phones, seed=1) != unevenness(phones, seed=2)


def test_the_command_prints_each_and_json_has_no_inf(short, tmp_path):
    online = Availability.of([np.empty((0, 2))] * 3, 100.0)
    fleet(3, availability=online).write(tmp_path / "never.parquet")
    words = ["traces", "unevenness", str(tmp_path / "never.parquet")]
    said = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (said["StatMC-R"], said["StatMC-T"]) == (0.0, None)
    assert "inf  StatMC-T" in CliRunner().invoke(app, words).stdout
