"""The benchmark of ShadowSync has links of the ratio that it says, and counts and pairs runs."""

import numpy as np
import pytest
from places import PLAY

from fedstale.traces import Job


@pytest.fixture(scope="module")
def bench():
    from sites import shadow

    return shadow


@pytest.mark.parametrize("times", [0.3, 7.0])
def test_a_model_takes_some_times_a_job_both_ways(bench, times):
    sites = np.arange(bench.N)
    job = Job(work=0.0, download_bytes=bench.BYTES, upload_bytes=bench.BYTES)
    found = bench.traces_of(times, 1).trips(sites, np.zeros(bench.N), job)
    np.testing.assert_allclose(found.ended, bench.LINKS * times * bench.WORK / 6.0)
    assert bench.LINKS.mean() == pytest.approx(1.0)


def test_arms_are_compared_after_the_same_time_and_as_many_characters(bench):
    def runs(rate, losses):
        return [[[0.0, 0, 4.0, 0.0], [1800.0, 10, loss, rate]] for loss in losses]

    base = {"rate": 0.5, "found": runs(100.0, (3.0, 3.2, 3.4))}
    other = {"rate": 0.3, "found": runs(200.0, (2.0, 2.2, 2.4))}
    overlap = {"rate": 0.5, "found": runs(300.0, (2.5, 2.7, 2.9))}
    arms = {bench.BASE: base, "shadow, elastic": other, bench.OVERLAP: overlap, bench.ROUNDS: base}
    first, second, *_ = bench.rows_of(arms, 3.0)
    assert first["to_base"] == [0.0, 0.0, 0.0]
    assert second["characters_ratio"][0] == pytest.approx(2.0)
    assert second["characters_per_hour"] == 400.0
    assert second["gigabytes_per_hour"] == 20 * 0.05
    assert second["loss"] == pytest.approx(2.2)
    assert second["to_base"][0] == pytest.approx(-1.0)
    assert second["to_overlap"][0] == pytest.approx(-0.5)
    assert second["to_rounds_by_characters"][0] == pytest.approx(3.1 - 3.2)
    # After 200 characters of 300, two thirds of the way from 4.0 to 2.7.
    assert second["to_overlap_by_characters"][0] == pytest.approx(2.2 - (4.0 - 2 / 3 * 1.3))
    assert [row["is_end"] for row in (first, second)] == [False, False]


@pytest.mark.skipif(not PLAY.is_file(), reason=f"{PLAY} is not here")
@pytest.mark.slow
def test_a_site_that_never_stops_trains_on_more_characters(bench):
    names = (bench.BASE, bench.OVERLAP, "shadow, elastic")
    found = [bench.run((f"3.0: {name}", 0.3, 1), str(PLAY), until_s=250.0) for name in names]
    buffered, overlapping, shadow = (run[-1][3] for run in found)
    assert 0 < buffered < overlapping < shadow
    assert shadow % (bench.BATCH * bench.LENGTH) == 0
    for run in found:
        assert run[0][:2] == [0.0, 0]


def test_what_the_page_says_of_who_is_ahead_is_what_came_out(bench):
    from lab.results import read_result

    rows = {(row["ratio"], row["arm"]): row for row in read_result("shadow")["rows"]}
    elastic = [rows[times, "shadow, elastic"] for times in bench.UNTIL_S]
    for row in elastic:
        assert row["to_overlap"][2] < 0
        assert -0.135 < row["to_overlap"][0] < -0.015
        assert rows[row["ratio"], bench.OVERLAP]["to_base"][2] < 0
    *better, level = (row["to_overlap_by_characters"] for row in elastic)
    assert all(-0.105 < mean < -0.035 and high < 0 for mean, _, high in better)
    assert level[1] < 0 < level[2]
    assert rows[3.0, "FedBuff(6, 4), overlapping"]["to_overlap"][1] > 0
    # Beside rounds a tie after as many characters, and behind where these see few.
    lows = [row["to_rounds_by_characters"][1] for row in elastic]
    assert [low > 0 for low in lows] == [False, False, True, True]
    average, whole = (rows[3.0, f"shadow, {arm}"]["to_overlap"] for arm in ("average", "elastic"))
    assert whole[0] < average[0] < average[2] < 0
    assert rows[3.0, "shadow, block"]["to_overlap"][1] > 0

    def kept(arm):
        first, last = (rows[times, arm]["characters_per_hour"] for times in (0.3, 7.0))
        return last / first

    assert kept("shadow, elastic") == pytest.approx(5 / 6, abs=0.01)
    assert kept(bench.OVERLAP) == pytest.approx(2 / 3, abs=0.02)
    assert kept(bench.ROUNDS) == pytest.approx(1 / 5, abs=0.03)
    sent = [rows[0.3, arm]["gigabytes_per_hour"] for arm in ("shadow, elastic", bench.OVERLAP)]
    assert sent[0] / sent[1] == pytest.approx(3.0, abs=0.15)
    assert not any(row["is_end"] for row in rows.values())
