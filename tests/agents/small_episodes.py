"""Simulators small enough to compute by hand, and episodes made to measure."""

import numpy as np

from fedstale.agents.env.episodes import AGES, GROUPS, NOISES, Episodes, EpisodeSettings, JobKinds
from fedstale.agents.env.forecast_table import NoForecasts
from fedstale.agents.env.learning_proxy import LearningProxy
from fedstale.agents.env.scenario import Scenario
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.trace_set import numbered

SIMPLE = LearningProxy(eta=0.3, delta=0.0, nu=0.0, rho=0.1, fade=1.0, ceiling=5.0, loss_noise=0.0)


def fleet(windows, *, compute=1.0, length=10_000.0, repeat=False):
    """One device for each list of windows, with links so fast that only training takes time."""
    n = len(windows)
    return TraceSet(
        device_ids=numbered("d", n),
        availability=Availability.of(windows, length, repeat=repeat),
        compute=Series.constant(np.broadcast_to(np.asarray(compute, dtype=float), (n,))),
        downlink=Series.constant(np.full(n, 1e18)),
        uplink=Series.constant(np.full(n, 1e18)),
    )


def one_kind(work=100.0, ttl_s=1000.0, median_s=100.0):
    return JobKinds(
        work=np.array([work]),
        n_bytes=np.array([1000.0]),
        ttl_s=np.array([ttl_s]),
        median_s=np.array([median_s]),
    )


def episodes(devices, *, b=1, **changed):
    """Episodes of the same devices, each with all of one group of data and 10 examples."""
    devices = np.atleast_2d(devices)
    devices = np.repeat(devices, b, axis=0) if len(devices) == 1 else devices
    b, n = devices.shape
    mixtures = np.zeros((b, n, GROUPS))
    mixtures[:, np.arange(n), np.arange(n) % GROUPS] = 1.0
    values = {
        "devices": devices,
        "present": np.ones((b, n), dtype=bool),
        "start": np.zeros(b),
        "end": np.full(b, 10_000.0),
        "rounds": np.full(b, 50),
        "kind": np.zeros(b, dtype=np.int64),
        "concurrency": np.full(b, 2),
        "buffer_size": np.full(b, 2),
        "keeps_stragglers": np.zeros(b, dtype=bool),
        "deadline_s": np.full(b, np.inf),
        "age_weights": np.ones((b, AGES)),
        "cooldown_s": np.zeros(b),
        "requests_forecasts": np.ones(b, dtype=bool),
        "over_reports": np.zeros((b, n), dtype=bool),
        "inflates": np.zeros((b, n), dtype=bool),
        "mixtures": mixtures,
        "examples": np.full((b, n), 10.0),
        "noise": np.zeros((b, n, NOISES)),
    }
    for name, value in changed.items():
        values[name] = np.broadcast_to(np.asarray(value, values[name].dtype), values[name].shape)
    return Episodes(**{name: np.array(value) for name, value in values.items()})


def simulator_of(traces, made, *, kinds=None, forecasts=None, proxy=SIMPLE, **settings):
    """A simulator in which the episodes have begun."""
    scenario = Scenario(
        traces=traces,
        kinds=kinds or one_kind(),
        forecasts=forecasts or NoForecasts(),
        devices=np.arange(traces.n_devices),
        start=0.0,
        end=np.inf,
        settings=EpisodeSettings(devices=(1, made.devices.shape[1]), **settings),
        proxy=proxy,
    )
    simulator = scenario.simulator(len(made))
    simulator.reset(made)
    return simulator


def send(simulator, *columns, row=0):
    """Send jobs in one episode, and go on to its next choice."""
    picked = np.zeros((1, simulator.n), dtype=bool)
    picked[0, list(columns)] = True
    rows = np.array([row])
    simulator.dispatch(rows, picked)
    return simulator.advance(rows)
