"""Metrics at a port of this machine, and as Prometheus itself scrapes and answers for them."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from math import isfinite
from urllib.parse import quote

import pytest
from flwr.app import MetricRecord
from virtual_grid import identity
from watched_run import PlainGrid, arrays, boasting, failing, get, good, misshapen, queries

from fedstale.deployment.local import free_port
from fedstale.deployment.processes import ProcessGroup
from fedstale.live import exported
from fedstale.strategies import StaleStrategy, schedule
from fedstale.strategies.server.checks import Validation


def test_it_listens_on_loopback_and_answers_no_other_site():
    grid, port = PlainGrid(good), free_port()
    with exported(grid, port):
        assert get(port, "/metrics")[0] == 200
        assert get(port, "/metrics", host="evil.example.org")[0] == 400
        assert get(port, "/")[0] == 404
        with pytest.raises(OSError, match="refused"):
            http.client.HTTPConnection("127.0.0.2", port, timeout=5).connect()


def test_the_built_in_apps_import_nothing_of_it_unless_it_is_wanted():
    code = "import fedstale.apps.server, sys; print(*sorted(set(sys.modules) & {names}))"
    names = "{'prometheus_client', 'fedstale.live.server', 'starlette.routing'}"
    command = [sys.executable, "-c", code.replace("{names}", names)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


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
