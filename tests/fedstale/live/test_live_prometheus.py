"""Metrics for Prometheus: what a real strategy's run says by them, and where they are served."""

import re
import sys

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from loopback import Loopback
from virtual_grid import VirtualGrid, identity
from watched_run import (
    SIZE,
    PlainGrid,
    arrays,
    boasting,
    failing,
    get,
    good,
    misshapen,
    queries,
)

from fedstale.errors import ConfigError
from fedstale.live import exported
from fedstale.live.prometheus import Exporter
from fedstale.strategies import StaleStrategy, schedule
from fedstale.strategies.server.checks import Validation

PORT = 9100


@pytest.fixture(autouse=True)
def _unheard():
    """Serve within this process."""
    with Loopback().installed():
        yield


def value(exporter, name, /, **labels):
    return exporter.registry.get_sample_value(f"fedstale_{name}", labels)


def run(*nodes, rounds=3, buffer_size=2, **settings):
    """Return what a run on nodes has told an exporter."""
    grid, exporter = PlainGrid(*nodes), Exporter(app="adder", run_id=7)
    grid.runtime.add(exporter)
    settings.setdefault("schedule", schedule.k_batch_async(len(nodes), buffer_size))
    with identity():
        StaleStrategy(seed=1, **settings).start(
            grid,
            arrays(0.0),
            num_rounds=rounds,
            timeout=60.0,
            evaluate_fn=lambda version, model: MetricRecord({"loss": 1.0 / (1 + version)}),
        )
    return exporter


def test_a_run_is_counted_as_it_went():
    exporter = run(good, good, rounds=3)
    assert value(exporter, "model_version") == 3
    assert value(exporter, "versions_total") == 3
    assert value(exporter, "update_staleness_count") == 6
    assert value(exporter, "jobs_ended_total", type="train", ending="reported") == 6
    assert value(exporter, "nodes_online") == 2
    assert value(exporter, "metric", source="server", name="loss") == 0.25
    assert value(exporter, "reply_seconds_sum", type="train") == 60.0
    labels = {"app": "adder", "run_id": "7"}
    (info,) = [m for m in exporter.registry.collect() if m.name == "fedstale_run_info"]
    assert labels.items() <= info.samples[0].labels.items()


def test_bytes_of_both_ways_hold_the_arrays():
    exporter = run(good, rounds=4, buffer_size=1)
    sent = value(exporter, "jobs_sent_total", type="train")
    for name, n in (("sent", sent), ("received", 4)):
        n_bytes = value(exporter, f"{name}_bytes_total", type="train")
        assert 4 * SIZE < n_bytes / n < 6 * SIZE


def test_checks_carry_the_kind_that_validation_found():
    exporter = run(good, good, misshapen, rounds=3)
    assert value(exporter, "checks_total", kind="shape") >= 1


def test_a_client_that_fails_is_no_rejection():
    exporter = run(good, failing, rounds=2, buffer_size=1)
    assert value(exporter, "jobs_ended_total", type="train", ending="client-error") >= 1
    (checks,) = [m for m in exporter.registry.collect() if m.name == "fedstale_checks"]
    assert checks.samples == []


def test_flowers_own_strategy_is_counted_too():
    grid = PlainGrid(good, good)
    port = PORT
    with identity(), exported(grid, port) as watched:
        strategy = FlowersFedAvg(fraction_evaluate=0.0)
        strategy.start(watched, arrays(0.0), num_rounds=2)
        text = get(port, "/metrics")[1]
    assert "fedstale_model_version 2.0" in text
    assert 'fedstale_reply_seconds_count{type="train"} 4.0' in text


def test_the_age_of_the_last_turn_is_known_while_the_loop_stands_still():
    with exported(PlainGrid(good), PORT):
        first, second = (get(PORT, "/metrics")[1] for _ in range(2))
    ages = [
        float(re.search(r"^fedstale_turn_age_seconds (\S+)$", t, re.M)[1]) for t in (first, second)
    ]
    assert 0.0 <= ages[0] < ages[1]


def test_a_port_that_is_taken_is_one_sentence():
    with (
        exported(PlainGrid(good), PORT),
        pytest.raises(ConfigError, match="metrics-port = "),
        exported(PlainGrid(good), PORT),
    ):
        pass


def test_off_it_adds_no_callback_and_a_simulation_is_left_as_it_is():
    for grid, port in ((PlainGrid(good), 0), (VirtualGrid({10: good}), PORT)):
        before = {name: list(told) for name, told in grid.runtime.listeners.items()}
        with exported(grid, port) as same:
            assert same is grid
            assert grid.runtime.listeners == before
    assert same.runtime is grid.runtime


def test_the_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"needs prometheus_client, .*\[server\]"):
        Exporter()


def exported_samples():
    """Return the names of all samples of a run with their labels' names, as a scrape shows them."""
    strict = Validation(examples_cap=1.5, enough=2)
    nodes = good, good, misshapen, failing, boasting
    exporter = run(*nodes, rounds=6, buffer_size=1, validation=strict)
    found = {}
    for metric in exporter.registry.collect():
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


WORD = r"[a-zA-Z_:][a-zA-Z0-9_:]*"


def test_each_query_of_the_dashboard_asks_for_what_is_exported():
    known, asked = exported_samples(), queries()
    assert len(asked) >= 10
    for query in asked:
        plain = re.sub(r'"[^"]*"', '""', query)
        names = set(re.findall(rf"\b((?:fedstale|process)_{WORD})", plain))
        assert names, query
        assert names <= known.keys(), f"{names - known.keys()} in {query}"
        labels = {
            label.strip()
            for inside in re.findall(r"(?:by|without) \(([^)]*)\)", plain)
            for label in inside.split(",")
        }
        labels |= set(re.findall(rf'({WORD})\s*(?:=~|!=|!~|=)\s*""', plain))
        # Prometheus adds these two itself.
        offered = set().union(*(known[name] for name in names)) | {"instance", "job"}
        assert labels <= offered, f"{labels - offered} in {query}"
