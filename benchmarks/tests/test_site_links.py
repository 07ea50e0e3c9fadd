"""The benchmark of links trains in each place, by each method, as it says."""

from dataclasses import replace

import numpy as np
import pytest
from places import PLAY, RECORDINGS

from fedstale.traces import Job

NEEDS = pytest.mark.skipif(
    not (PLAY.is_file() and RECORDINGS.is_dir()), reason="the recordings are not here"
)


@pytest.fixture
def bench(monkeypatch):
    from sites import links

    for name, place in links.PLACES.items():
        monkeypatch.setitem(links.PLACES, name, replace(place, until_s=240.0))
    return links


@NEEDS
@pytest.mark.slow
def test_each_method_learns_in_its_place_and_overlap_brings_more_jobs(bench):
    jobs = {}
    for arm in bench.ARMS:
        found = bench.run((arm, 0.5, 1), str(PLAY), RECORDINGS)
        assert found[-1][2] < found[0][2] - 0.5
        jobs[arm] = found[-1][1]
    small = "250 MB, replies in int4"
    assert jobs[f"{small}: buffer"] > 1.3 * jobs["250 MB: buffer"]
    assert jobs[f"{small}: buffer, overlapping"] > 1.3 * jobs[f"{small}: buffer"]


@NEEDS
@pytest.mark.slow
def test_links_are_recorded_and_desktops_are_not_always_there(bench):
    own, lte = (
        bench.PLACES[name].traces(RECORDINGS, 1) for name in ("250 MB", "25 MB, recorded LTE")
    )
    job = Job(work=1.0, download_bytes=25e6, upload_bytes=25e6)
    wired, slow = (t.trips(np.arange(12), np.zeros(12), job).upload_s for t in (own, lte))
    assert np.median(slow) > 5 * np.median(wired)
    there = bench.desktops(RECORDINGS, 1)
    first, _ = there.channel("availability").window_at_or_after(np.arange(16), np.zeros(16))
    assert 4 <= (first == 0).sum() < 16


def test_the_buffer_small_replies_and_no_overlap_are_what_pays_as_the_page_says():
    from lab.results import read_result

    rows = {(row["place"], row["method"]): row for row in read_result("site_links")["rows"]}
    for (place, method), row in rows.items():
        if method == "rounds" and "desktops" not in place:
            assert row["difference"][1] > 0
    assert rows["25 MB, 16 recorded desktops", "rounds"]["difference"][1] < 0
    small = "250 MB, replies in int4"
    for method in ("buffer", "rounds"):
        assert rows[small, method]["beside"][2] < 0
        assert 1.6 < rows[small, method]["jobs"] / rows["250 MB", method]["jobs"] < 1.9
    overlap = rows[small, "buffer, overlapping"]
    assert overlap["jobs"] / rows[small, "buffer"]["jobs"] > 1.55
    assert 0 < overlap["difference"][1] < overlap["difference"][2] < 0.02
