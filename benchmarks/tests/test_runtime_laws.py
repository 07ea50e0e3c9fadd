"""Merges take as long as the laws of Dutta et al. say, on devices without memory."""

from dataclasses import replace

import numpy as np
import pytest

from fedstale.traces import Job


@pytest.fixture(scope="module")
def runtime():
    from papers import laws

    return laws


def test_a_job_takes_an_exponential_time_whenever_it_starts(runtime):
    traces = runtime.memoryless_devices(20, 0.0, seed=3)
    rng = np.random.default_rng(4)
    devices, sent = np.repeat(np.arange(20), 500), rng.uniform(0, 1500, 20 * 500)
    job = Job(work=1.0, download_bytes=1, upload_bytes=1)
    taken = traces.trips(devices, sent, job).reported - sent
    # The same bursts end several of these jobs, so the error is that of 20 x 1500 s of bursts.
    assert taken.mean() == pytest.approx(1.0, abs=0.04)
    for q in (0.1, 0.5, 0.9):
        assert np.mean(taken < -np.log(1 - q)) == pytest.approx(q, abs=0.03)


def test_jobs_one_after_the_other_come_at_the_rate_of_the_bursts(runtime):
    traces = runtime.memoryless_devices(1, 0.0, seed=5)
    job, now, times = Job(work=1.0, download_bytes=1, upload_bytes=1), 0.0, []
    for _ in range(600):
        reported = float(traces.trips([0], now, job).reported[0])
        times.append(reported - now)
        now = reported
    bursts = float(traces.compute.integral([0], 0.0, now)[0])
    assert len(times) == pytest.approx(bursts, abs=1.1)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("schedule", ["K-sync", "K-batch-sync", "K-async", "K-batch-async"])
def test_a_merge_takes_the_time_of_its_law(runtime, schedule, shift):
    laws = [law for law in runtime.LAWS if law.schedule == schedule and law.shift_s == shift]
    if not laws:
        pytest.skip(f"there is no law for {schedule} with a constant part")
    law = laws[0]
    mean, error = runtime.simulated(law, 400, seed=2)
    slack = 4 * error + 0.01 * law.expected_s
    assert mean <= law.expected_s + slack
    if not law.at_most:
        assert mean >= law.expected_s - slack


def test_a_merge_of_the_first_four_of_eight_takes_the_fourth_order_statistic(runtime):
    mean, error = runtime.simulated(runtime.LAWS[0], 150, seed=2)
    assert mean == pytest.approx(1 / 5 + 1 / 6 + 1 / 7 + 1 / 8, abs=4 * error + 0.01)


@pytest.mark.slow
def test_without_spare_devices_forgotten_jobs_delay_the_next_merge(runtime):
    law = replace(runtime.LAWS[0], n_devices=runtime.P)
    mean, error = runtime.simulated(law, 400, seed=2)
    assert mean > law.expected_s + 4 * error
