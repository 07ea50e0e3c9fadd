"""Metrics for Prometheus: what a real strategy's run says by them, and where they are served."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing
from math import inf, isfinite
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from told_run import ToldRun

from fedstale.deployment.local import free_port
from fedstale.deployment.processes import ProcessGroup
from fedstale.errors import ConfigError
from fedstale.live import exported
from fedstale.live.prometheus import PHASES, Exporter
from fedstale.strategies import StaleStrategy, schedule
from fedstale.strategies.server.superlink import SuperLinkGrid
from fedstale.strategies.server.validation import FORECAST_RECORD, Validation

sys.path.append(str(Path(__file__).parents[2] / "strategies"))

from virtual_grid import VirtualGrid, identity

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD, PAGE = DOCS / "deploy" / "grafana.json", DOCS / "live.md"
SIZE = 1000


def arrays(value, n=SIZE):
    return ArrayRecord({"w": Array(np.full(n, value, dtype=np.float32))})


def answer(value=1.0, n=SIZE, examples=1, p_finish=None):
    metrics = MetricRecord({"num-examples": examples})
    content = {"arrays": arrays(value, n), "metrics": metrics}
    if p_finish is not None:
        content[FORECAST_RECORD] = ConfigRecord({"p_finish": p_finish})
    return RecordDict(content)


def good(message, grid):
    """Train for 10 s and promise to finish with probability 0.75."""
    return 10.0, answer(p_finish=0.75)


def boasting(message, grid):
    """Claim many examples."""
    return 10.0, answer(examples=1000)


def failing(message, grid):
    """Fail after 5 s."""
    return 5.0, Error(2, "out of memory")


def misshapen(message, grid):
    """Send arrays of another shape."""
    return 3.0, answer(n=SIZE + 1)


def silent(message, grid):
    """Say nothing."""
    return 0.0, None


class PlainGrid(SuperLinkGrid):
    """The grid of real devices in front of functions, with their virtual clock."""

    def __init__(self, *nodes):
        grid = VirtualGrid(dict(enumerate(nodes, start=10)))
        super().__init__(grid, clock=grid)


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
    assert value(exporter, "buffered_updates") == 0
    assert value(exporter, "metric", source="server", name="loss") == 0.25
    assert value(exporter, "phase_seconds_sum", phase="train") == 60.0
    assert value(exporter, "phase_seconds_sum", phase="version") == 20.0
    labels = {"app": "adder", "run_id": "7"}
    (info,) = [m for m in exporter.registry.collect() if m.name == "fedstale_run_info"]
    assert labels.items() <= info.samples[0].labels.items()


def test_bytes_of_both_ways_hold_the_arrays():
    exporter = run(good, rounds=4, buffer_size=1)
    sent = value(exporter, "jobs_sent_total", type="train")
    for name, n in (("sent", sent), ("received", 4)):
        n_bytes = value(exporter, f"{name}_bytes_total", type="train")
        assert 4 * SIZE < n_bytes / n < 6 * SIZE


def test_forecasts_are_summed_beside_what_became_of_them():
    turns = []

    def fickle(message, grid):
        # Promises 0.75 with each reply, and fails every second time.
        turns.append(message)
        return failing(message, grid) if len(turns) % 2 == 0 else good(message, grid)

    exporter = run(fickle, rounds=4, buffer_size=1)
    # Jobs before the first reply have no forecast; of those after, some end as promised.
    n = value(exporter, "forecast_jobs_total")
    assert (
        n
        == sum(
            value(exporter, "jobs_ended_total", type="train", ending=e)
            for e in ("reported", "client-error")
        )
        - 1
    )
    assert value(exporter, "forecast_p_finish_total") == 0.75 * n
    assert value(exporter, "forecast_finished_total") == 3
    assert n - 3 == value(exporter, "jobs_ended_total", type="train", ending="client-error")


def test_rejections_carry_the_kind_that_validation_found():
    exporter = run(good, good, misshapen, rounds=3)
    assert value(exporter, "rejections_total", reason="shape") >= 1
    # What was rejected waits for no server step.
    assert value(exporter, "buffered_updates") == 0


def test_a_client_that_fails_is_no_rejection():
    exporter = run(good, failing, rounds=2, buffer_size=1)
    assert value(exporter, "jobs_ended_total", type="train", ending="client-error") >= 1
    rejections = [m for m in exporter.registry.collect() if m.name == "fedstale_rejections"]
    assert {s.labels["reason"] for s in rejections[0].samples} <= {"not aggregated"}


def test_a_job_that_is_given_up_has_timed_out():
    exporter = run(good, silent, rounds=9, buffer_size=1)
    assert value(exporter, "jobs_ended_total", type="train", ending="timed out") >= 1


def test_an_update_waits_in_the_buffer_until_its_server_step():
    seen = []

    def slow(message, grid):
        return 50.0, answer()

    grid, exporter = PlainGrid(good, slow), Exporter()
    grid.runtime.add(exporter)

    class Look(Exporter):
        def time_moved(self, run):
            seen.append(value(exporter, "buffered_updates"))

    grid.runtime.add(Look())
    with identity():
        strategy = StaleStrategy(schedule=schedule.k_sync(2, 2), seed=1)
        strategy.start(grid, arrays(0.0), num_rounds=1, timeout=600.0)
    # One has come; then both, before the step that takes them.
    assert set(seen) == {0.0, 1.0, 2.0}
    assert value(exporter, "buffered_updates") == 0
    assert value(exporter, "phase_seconds_sum", phase="buffer") == 40.0


def test_rejections_of_an_earlier_run_are_not_counted_again():
    exporter = Exporter()
    told = ToldRun(exporter)
    told.runtime.started()
    told.runtime.rejections = exporter_counts = type(told.runtime.rejections)()
    exporter_counts["rejected: shape"] = 50  # as a checkpoint restores them
    told.moved(1.0)
    exporter_counts["rejected: shape"] += 1
    told.runtime.rejected("m", reason="arrays['w'] has shape (3,)")
    assert value(exporter, "rejections_total", reason="shape") == 1


def test_flowers_own_strategy_is_counted_too():
    grid = PlainGrid(good, good)
    port = free_port()
    with identity(), exported(grid, port) as watched:
        strategy = FlowersFedAvg(fraction_evaluate=0.0)
        strategy.start(watched, arrays(0.0), num_rounds=2)
        text = get(port, "/metrics")[1]
    assert "fedstale_model_version 2.0" in text
    assert "fedstale_buffered_updates 0.0" in text
    assert 'fedstale_phase_seconds_count{phase="aggregate"} 2.0' in text


def get(port, path, host="localhost"):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Host": host})
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def test_it_is_ready_once_there_are_a_model_and_nodes_and_healthy_while_its_loop_turns():
    grid, port, seen = PlainGrid(good), free_port(), []
    grid._grid.online = lambda now: [10] if now > 100.0 else []

    class Ask(Exporter):
        def time_moved(self, run):
            if grid._grid.time in (0.0, 60.0) or run.n_online():
                seen.append((get(port, "/readyz"), get(port, "/healthz")[0]))

    with identity(), exported(grid, port, turn_limit_s=30.0) as watched:
        assert get(port, "/readyz") == (503, "no model yet, no node online\n")
        for callbacks in grid.runtime.told.values():
            for told in callbacks:
                if isinstance(getattr(told, "__self__", None), Exporter):
                    told.__self__._every_s = 0.0
        grid.runtime.add(Ask())
        StaleStrategy(seed=1, schedule=schedule.k_batch_async(1, 1)).start(
            watched, arrays(0.0), num_rounds=1, timeout=60.0
        )
    assert seen[0] == ((503, "no node online\n"), 200)
    assert seen[-1] == ((200, "ok\n"), 200)


def test_a_loop_that_does_not_turn_is_not_healthy():
    grid, port = PlainGrid(good), free_port()
    with exported(grid, port, turn_limit_s=-1.0):
        status, text = get(port, "/healthz")
    assert status == 503
    assert "has not turned for 0 s" in text


def test_it_listens_on_loopback_and_answers_no_other_site():
    grid, port = PlainGrid(good), free_port()
    with exported(grid, port):
        assert get(port, "/metrics")[0] == 200
        assert get(port, "/metrics", host="evil.example.org")[0] == 403
        assert get(port, "/")[0] == 404
        with pytest.raises(OSError, match="refused"):
            http.client.HTTPConnection("127.0.0.2", port, timeout=5).connect()


def test_a_port_that_is_taken_is_one_sentence():
    port = free_port()
    with (
        exported(PlainGrid(good), port),
        pytest.raises(ConfigError, match="metrics-port = "),
        exported(PlainGrid(good), port),
    ):
        pass


def test_off_it_adds_no_callback_and_a_simulation_is_left_as_it_is():
    for grid, port in ((PlainGrid(good), 0), (VirtualGrid({10: good}), free_port())):
        before = {name: list(told) for name, told in grid.runtime.told.items()}
        with exported(grid, port) as same:
            assert same is grid
            assert grid.runtime.told == before
    assert same.runtime is grid.runtime


def test_the_built_in_apps_import_nothing_of_it_unless_it_is_wanted():
    code = "import fedstale.apps.server, sys; print(*sorted(set(sys.modules) & {names}))"
    names = "{'prometheus_client', 'fedstale.live', 'http.server'}"
    command = [sys.executable, "-c", code.replace("{names}", names)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_the_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstale\[server\]'"):
        Exporter()


def queries():
    """Return each query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


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


@pytest.mark.slow
def test_prometheus_answers_each_query_of_the_dashboard_with_numbers(tmp_path):
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    grid, port, own = PlainGrid(good, good, misshapen, failing, boasting), free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"- {{job_name: fedstale, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
    )
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{own}"]

    def answers(query):
        path = "/api/v1/query?query=" + quote(query.replace("$instance", ".*"))
        status, text = get(own, path)
        assert status == 200, f"{query}: {text}"
        return [float(series["value"][1]) for series in json.loads(text)["data"]["result"]]

    def until(condition):
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.2)

    def is_ready():
        try:
            return get(own, "/-/ready")[0] == 200
        except OSError:
            return False

    def n_scrapes():
        return sum(answers("sum(count_over_time(fedstale_run_info[1h]))"))

    with identity(), exported(grid, port) as watched, ProcessGroup() as processes:
        processes.start(
            "prometheus", command, environment=os.environ, log=tmp_path / "prometheus.log"
        )
        until(is_ready)
        # A rate is of what is counted between two scrapes.
        for number in (2, 4):
            strategy = StaleStrategy(
                seed=1,
                schedule=schedule.k_batch_async(5, 1),
                validation=Validation(examples_cap=1.5, enough=2),
            )
            strategy.start(
                watched,
                arrays(0.0),
                num_rounds=6,
                timeout=60.0,
                evaluate_fn=lambda version, model: MetricRecord({"loss": 1.0}),
            )
            until(lambda number=number: n_scrapes() >= number)
        silent = [query for query in queries() if not any(map(isfinite, answers(query)))]
    assert silent == []


def test_the_dashboard_shows_each_metric_of_a_run():
    asked = " ".join(queries())
    own = {name for name in exported_samples() if name.startswith("fedstale_")}
    shown = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in own}
    assert {name for name in shown if name not in asked} == set()


def test_the_page_lists_each_metric_with_its_labels():
    table = re.findall(r"^\| (`fedstale_.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    listed = {}
    for names, labels in table:
        for name in re.findall(r"`(.*?)`", names):
            listed[name] = set(re.findall(r"`(.*?)`", labels))
    samples = exported_samples()
    exported_names = {n: labels for n, labels in samples.items() if n.startswith("fedstale_")}
    histograms = {name.removesuffix("_bucket") for name in samples if name.endswith("_bucket")}
    expected = {
        name: labels
        for name, labels in exported_names.items()
        if not re.fullmatch(r"(.*)_(bucket|sum|count|created)", name)
    }
    expected |= {name: exported_names[f"{name}_bucket"] for name in histograms}
    assert listed == expected


def test_phases_are_those_that_are_timed():
    exporter = run(good, rounds=3, buffer_size=1)
    timed = {
        sample.labels["phase"]
        for metric in exporter.registry.collect()
        if metric.name == "fedstale_phase_seconds"
        for sample in metric.samples
    }
    assert {"send", "train", "buffer", "aggregate", "test", "version"} == timed <= set(PHASES)
    for phase in timed:
        assert value(exporter, "phase_seconds_sum", phase=phase) < inf
