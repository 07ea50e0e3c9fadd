"""One hostile or broken client in a simulation: the run goes on, and says which device it was."""

import json
import re
import subprocess
import sys

import pandas as pd
import pytest
from small_app import CLIENT, SERVER, write_small_app

BAD = 3
"""Partition of the bad client."""
BODY = "    return Message(RecordDict({"
WAYS = {
    "huge": "    if BAD: w = np.full_like(w, 3.4e38)\n",
    "list": "    if BAD: return replied(message, w, {'list': [0.5] * 10**6})\n",
    "loop": "    while BAD: pass\n",
}
SAYS = {
    "huge": r"the norm of the update is 5\.89e\+38: at most 1e\+15",
    "list": r"the reply has 1,000,000 elements of lists: at most 10,000, by Validation\(most_elem",
    "loop": r"its client did not end within 2 s \(client-limit-s\)",
}
REPLIED = """

def replied(message, w, values):
    from flwr.app import ConfigRecord
    content = {
        "arrays": ArrayRecord([w]),
        "metrics": MetricRecord({"num-examples": 10}),
        "more": ConfigRecord(values),
    }
    return Message(RecordDict(content), reply_to=message)


@app.train()
"""


def app_with(path, way):
    bad = WAYS[way].replace("BAD", f"context.node_config['partition-id'] == {BAD}")
    client = CLIENT.replace(
        '    metrics = MetricRecord({"train_loss"', bad + '    metrics = MetricRecord({"train_loss"'
    )
    client = client.replace("\n\n@app.train()\n", REPLIED, 1)
    a, b = SERVER.index("    options = "), SERVER.index("    strategy.start(")
    strategy = "    from fedstale.strategies import FedBuff\n    strategy = FedBuff(6, 3, seed=1)\n"
    return write_small_app(path, client=client, server=SERVER[:a] + strategy + SERVER[b:])


@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_client_is_named_and_the_run_ends_with_every_version(way, tmp_path):
    app, run = app_with(tmp_path / "app", way), tmp_path / "run"
    workers = ["--executor", "processes", "--workers", "2", "--set", "client-limit-s=2"]
    command = [sys.executable, "-m", "fedstale", "simulate", app, "--traces", "ideal:8"]
    # Each loop costs its limit, and the start of another process.
    n = 4 if way == "loop" else 12
    more = ["--out", run, "-c", f"rounds={n}", *(workers if way == "loop" else ())]
    result = subprocess.run(
        list(map(str, [*command, *more])),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", n), summary
    events = pd.read_parquet(run / "events.parquet")
    bad = events[events.reason.str.contains(SAYS[way])]
    assert len(bad) >= 1
    (device,) = set(bad.device_id)
    assert set(bad.status) == {"client-error" if way == "loop" else "rejected"}
    # No honest reply is lost with it.
    others = events[events.device_id != device]
    lost = others[~others.status.isin(["reported", "in-flight"])]
    assert set(lost.reason) <= {"the run ended before its server step"}
    counts = others.aggregated_version.value_counts()
    assert {int(counts.get(version, 0)) for version in range(1, n + 1)} == {3}
    report = (run / "report.html").read_text()
    if way == "loop":
        (error,) = summary["client_errors"]
        assert re.search(SAYS[way], error["error"])
        assert (error["devices"], error["jobs"]) == (1, len(bad))
    else:
        found, *_ = summary["rejected_devices"]
        assert (found["device"], found["replies"]) == (device, len(bad))
        assert re.search(SAYS[way], found["reason"])
        assert "Devices with most rejected replies" in report
        said = (run / "log.txt").read_text()
        assert re.search(f"node \\d+: reply rejected: {SAYS[way]}", said)
    assert re.search(SAYS[way], report)
