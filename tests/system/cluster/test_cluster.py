"""Runs on the nodes of a cluster: what comes of them is what comes of them on one machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tomli_w
from nodes import CAN_ISOLATE, cluster, has_checkpoint, sent_here
from short_searches import ASKED, LEFT_OVERS, collected, decisions
from spaces import table

import fedstale
from fedstale.app_folder import BUILT_IN
from fedstale.contrib.tuning import tune
from fedstale.traces import TraceSet

SAME = ("events.parquet", "metrics.parquet", "model.safetensors", "config.toml")
COMMAND = [sys.executable, "-c", "import fedstale.cli.main; fedstale.cli.main.app()"]
ISOLATED = pytest.mark.skipif(not CAN_ISOLATE, reason="namespaces are not allowed here")

__all__ = ["collected"]

pytestmark = [pytest.mark.timeout(900), *LEFT_OVERS]


def plan(**changes):
    """Return a plan of two variants and two seeds."""
    own = {"num-server-rounds": 100000}
    return {
        "app": "digits",
        "traces": "synthetic:20",
        "until": "8m",
        "seeds": [1, 2],
        "run-config": own,
        "variants": {
            "FedBuff": {"run-config": {"strategy": "FedBuff(6, 2)"}},
            "Gap-Aware": {"run-config": {"strategy": "GapAware(6, 2)"}},
        },
        **changes,
    }


@pytest.fixture
def own(tmp_path):
    """Return an app and recorded devices in folders that no node sees."""
    shutil.copytree(BUILT_IN / "digits", tmp_path / "my_app")
    TraceSet.synthetic(20, days=1, seed=3).write(tmp_path / "phones.parquet")
    return {"app": str(tmp_path / "my_app"), "traces": str(tmp_path / "phones.parquet")}


def files(folder):
    """Return the files of all runs below a folder that do not depend on wall time."""
    found = (path for name in SAME for path in folder.rglob(name) if "held-out" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_run_on_a_node_is_the_run_on_this_machine(tmp_path):
    one = plan(
        seeds=[1], until="4m", variants={"one": {"run-config": {"strategy": "FedBuff(6, 2)"}}}
    )
    shares = []
    with cluster(0, cores=1) as nodes:
        fedstale.compare(
            one,
            out=tmp_path / "there",
            address=nodes.address,
            watch=lambda share: shares.append(max(share.values())),
        )
    fedstale.compare(one, out=tmp_path / "here", workers=1)
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert len(files(tmp_path / "there")) == len(SAME)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    # Nothing stays on the node, nor beside the run.
    assert sent_here() == []
    assert not list(tmp_path.rglob(".*.incoming"))


@pytest.fixture(scope="module")
def nodes():
    with cluster(2) as found:
        yield found


@pytest.mark.slow
def test_a_search_with_one_worker_decides_as_on_one_machine(nodes, own, tmp_path):
    given = table(**{**ASKED, **own})
    for name, words in {"there": {"address": nodes.address}, "here": {}}.items():
        tune(given, out=tmp_path / name, workers=1, seed=5, **words)
    assert decisions(tmp_path / "there") == decisions(tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")
    statuses = {trial["status"] for trial in decisions(tmp_path / "there")}
    assert statuses == {"complete", "stopped"}
    held_out = [tmp_path / name / "held-out" / "comparison.csv" for name in ("there", "here")]
    assert held_out[0].read_bytes() == held_out[1].read_bytes()
    if CAN_ISOLATE:
        assert sent_here() == []


@pytest.mark.slow
@ISOLATED
def test_nodes_see_neither_the_app_nor_the_traces_nor_the_folder_of_the_search(nodes, own):
    for node in nodes.started:
        for path in own.values():
            assert Path(path).exists()
            assert not Path(f"/proc/{node.pid}/root{path}").exists()


@pytest.mark.slow
def test_a_plan_on_two_nodes_gives_the_bytes_of_one_machine(nodes, own, tmp_path):
    given = plan(**own)
    there = fedstale.compare(given, out=tmp_path / "there", address=nodes.address)
    here = fedstale.compare(given, out=tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")
    # All but the wall time of runs.
    assert there.table.equals(here.table)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    # What is done needs no cluster.
    fedstale.compare(given, out=tmp_path / "there", address="127.0.0.1:1")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == before


@pytest.mark.slow
def test_clients_of_an_app_that_no_node_has_train_in_actors_of_two_nodes(
    nodes, own, tmp_path, monkeypatch
):
    words = {**own, "until": "6m", "seed": 1}
    app = words.pop("app")
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    there = fedstale.simulate(app, **words, out=tmp_path / "there", executor="ray")
    fedstale.simulate(app, **words, out=tmp_path / "here", executor="inline")
    assert there.summary["executor"] == "2 Ray actors"
    for name in SAME[:3]:
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


@pytest.mark.slow
def test_what_a_killed_node_was_running_is_begun_again_and_fails_nothing(own, tmp_path):
    search = {"strategy": ["FedBuff(6, 2)", "GapAware(6, 2)"]}
    given = table(
        **{**own, "search": search, "trials": 2, "until": "8m", "rungs": ["2m", "4m"]},
        seeds=[1],
        run_config={"num-server-rounds": 100000},
    )
    words = {"search": "random", "stop": "none"}
    tune(given, out=tmp_path / "here", workers=1, **words)
    with cluster(2) as nodes:
        lost = []

        def watch(trial):
            # One has come to a rung, and both go on.
            if trial.reports and not lost:
                lost.append(nodes.started[0])
                nodes.kill(nodes.started[0])

        found = tune(
            given, out=tmp_path / "there", workers=2, watch=watch, address=nodes.address, **words
        )
        assert lost
        assert nodes.count() == 2
    assert list(found.trials["status"]) == ["complete"] * 2
    assert files(tmp_path / "there") == files(tmp_path / "here")
    values = [
        [report["value"] for report in trial["reports"]]
        for name in ("there", "here")
        for trial in decisions(tmp_path / name)
    ]
    assert values[:2] == values[2:]


@pytest.mark.slow
def test_a_client_that_ends_its_process_fails_its_configuration_alone(nodes, own, tmp_path):
    client = Path(own["app"]) / "digits_app" / "client_app.py"
    words = '    if context.run_config["learning-rate"] > 0.8:\n        os._exit(3)\n'
    text = client.read_text(encoding="utf-8")
    begin = text.index("def job(")
    body = text.index('"""\n', text.index('"""', begin) + 3) + 4
    client.write_text("import os\n" + text[:body] + words + text[body:], encoding="utf-8")
    given = table(
        **{**own, "search": {"learning-rate": [0.9, 0.1]}, "trials": 2},
        until="4m",
        rungs=["2m"],
    )
    found = {
        name: tune(given, out=tmp_path / name, search="random", workers=1, **address)
        for name, address in {"there": {"address": nodes.address}, "here": {}}.items()
    }
    for tuning in found.values():
        rows = tuning.trials[["learning-rate", "status"]].to_numpy().tolist()
        assert sorted(rows) == [[0.1, "complete"], [0.9, "failed"]]
        assert "its process ended" in "".join(tuning.trials["reason"])


@pytest.mark.slow
@ISOLATED
def test_a_plan_that_is_interrupted_keeps_what_its_runs_have_done(nodes, own, tmp_path):
    given = plan(**own, until="4h", seeds=[1], variants={"one": {}})
    given["run-config"] = {**given["run-config"], "strategy": "FedBuff(6, 2)"}
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(given), encoding="utf-8")
    command = [*COMMAND, "compare", "plan.toml", "-o", "out", "--json"]
    there = {**os.environ, "RAY_ADDRESS": nodes.address}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=there,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 90
    while not any(map(has_checkpoint, nodes.started)) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "0 of 1 runs done; the same command goes on" in said
    summary = tmp_path / "out" / "runs" / "one" / "1" / "summary.json"
    assert json.loads(summary.read_text(encoding="utf-8"))["status"] == "interrupted"
    again = subprocess.run(
        command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=250, check=False
    )
    assert again.returncode == 0, again.stderr
    fedstale.compare(given, out=tmp_path / "here")
    assert files(tmp_path / "out") == files(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_was_stopped_goes_on(nodes, own, tmp_path, how):
    given = table(**{**ASKED, **own, "seeds": [1], "trials": 3})
    tune(given, out=tmp_path / "whole", workers=1, seed=5)
    (tmp_path / "space.toml").write_text(tomli_w.dumps(given), encoding="utf-8")
    command = [*COMMAND, "tune", "space.toml", "-o", "out"]
    command += ["--workers", "1", "--seed", "5"]
    there = {**os.environ, "RAY_ADDRESS": nodes.address}
    process = subprocess.Popen(command, cwd=tmp_path, env=there, stderr=subprocess.PIPE, text=True)
    out, until = tmp_path / "out", time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
        done = decisions(out) if (out / "study.db").is_file() else []
        if any(trial["status"] == "complete" for trial in done):
            break
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=100)
    if how == signal.SIGINT:
        assert process.returncode == 130, said
        assert said.splitlines()[-1] == "fedstale: Ctrl-C; the same command goes on"
    else:
        assert process.returncode == -how, said
    kept = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/*/summary.json")}
    assert kept
    assert len(decisions(out)) < len(decisions(tmp_path / "whole")) + 1
    again = subprocess.run(
        command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=250, check=False
    )
    assert again.returncode == 0, again.stderr
    assert decisions(out) == decisions(tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path):
    command = [*COMMAND, "compare", "plan.toml"]
    there = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan()), encoding="utf-8")
    result = subprocess.run(
        command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedstale: address = '127.0.0.1:1': no Ray cluster answers there")


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


def is_open(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_the_token_of_a_cluster_is_the_callers(tmp_path, short):
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    start += [f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    # Paths of sockets are short.
    start += [f"--temp-dir={short}"]
    (tmp_path / "plan.toml").write_text(
        tomli_w.dumps(plan(seeds=[1], until="2m", variants={"one": {}})), encoding="utf-8"
    )
    command = [*COMMAND, "compare", "plan.toml"]
    head = subprocess.Popen(
        start,
        env={**os.environ, **own, "RAY_worker_niceness": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 100
        while not is_open(int(port)) and time.monotonic() < until:
            time.sleep(0.2)
        results = [
            subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, **token, "RAY_ADDRESS": f"127.0.0.1:{port}"},
                capture_output=True,
                text=True,
                timeout=250,
                check=False,
            )
            for token in ({}, {**own, "RAY_AUTH_TOKEN": "f" * 64}, own)
        ]
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)
    assert [result.returncode for result in results] == [2, 2, 0], results
    for result in results[:2]:
        *_, line = result.stderr.splitlines()
        assert "what answers there lets in only who has its token" in line
