"""The built-in apps and a new one, deployed by Flower's own commands on loopback."""

import json
import re
import urllib.request
from urllib.error import URLError

import pytest
from small_deployment import CLIENT, Running, means, write_app

import fedstale
from fedstale.app_folder import BUILT_IN
from fedstale.deployment.local import free_port, run_app

pytestmark = pytest.mark.deployment


FLOWERS = (
    "flower.FedAvg(fraction_train={}, fraction_evaluate=0.0, min_train_nodes=1, "
    "min_available_nodes=1)"
)


def accuracies(lines):
    """Return the accuracies that the server logged round by round."""
    found = [re.search(r"MetricRecord: \{.*?'accuracy': ([\d.]+)", line) for line in lines]
    return [float(match[1]) for match in found if match]


def test_digits_runs_on_real_supernodes_as_it_is(deployment):
    lines = []
    config = f"num-server-rounds=2 strategy='{FLOWERS.format(0.67)}'"
    run_app(deployment, BUILT_IN / "digits", run_config=config, show=lines.append)
    found = accuracies(lines)
    assert len(found) == 2, lines
    # FedAvg draws two of three nodes; a model that learned nothing knows one digit of ten.
    assert found[-1] > 0.4


def get(port, path):
    """Return what a port of this machine answers; empty while nobody listens there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.read().decode()
    except URLError:
        return ""


@pytest.mark.timeout(600)
def test_a_run_of_digits_is_scraped_and_watched_while_it_goes_on(deployment):
    live, metrics = free_port(), free_port()
    config = "strategy='FedBuff(3, 2)' num-server-rounds=2"
    config += f" live-port={live} metrics-port={metrics}"
    run = Running(deployment, BUILT_IN / "digits", config)
    texts = []

    def is_learning():
        texts.append(get(metrics, "/metrics"))
        # A version is there before it is evaluated.
        found = re.search(r'{name="accuracy",source="server"} (\S+)$', texts[-1], re.MULTILINE)
        return found is not None and float(found[1]) > 0.3

    run.until(is_learning, limit_s=240.0)
    text = texts[-1]
    samples = dict(re.findall(r"^(fedstale_\S+) (\S+)$", text, re.MULTILINE))
    shown = json.loads(get(live, "/data.json"))
    assert "<!doctype html>" in get(live, "/")
    run.end()
    assert samples["fedstale_nodes_online"] == "3.0"
    assert float(samples["fedstale_update_staleness_count"]) >= 2
    assert float(samples["fedstale_model_version"]) >= 1
    # The weights of 10 digits by 64 pixels and more, in float32, for two devices at least.
    for way in ("sent", "received"):
        assert float(samples[f'fedstale_{way}_bytes_total{{type="train"}}']) > 2 * 2560
    assert float(samples['fedstale_reply_seconds_sum{type="train"}']) > 1.0
    assert 'fedstale_run_info{app="digits"' in text
    cards = dict(shown["cards"])
    assert int(cards["rounds"]) >= 1
    assert cards["online"] == "3"
    assert int(cards["aggregated"]) >= 2
    assert float(cards["mean staleness"]) >= 0.0
    assert {"acc", "devices"} <= {figure["id"] for figure in shown["figures"]}
    assert any(f"live page: http://127.0.0.1:{live}/" in line for line in run.lines)
    # Its process has ended, and its numbers with it.
    assert get(metrics, "/metrics") == get(live, "/") == ""


OTHER_RELEASE = """
import fedstale
from fedstale.client import ForecastMod, mods


class OfAnotherRelease(ForecastMod):
    def __call__(self, message, context, call_next):
        if context.node_config["partition-id"] == 0:
            mods.__version__ = "99.0.1"
        return super().__call__(message, context, call_next)
"""


def test_a_node_of_another_release_is_named_and_the_others_train(deployment, tmp_path):
    client = CLIENT.replace("app = ClientApp()", "app = OfAnotherRelease().client_app()")
    app = write_app(tmp_path / "adder", client=OTHER_RELEASE + client)
    lines = []
    run_app(deployment, app, run_config="strategy='gap-aware' rounds=2", show=lines.append)
    # Nodes add 1, 2 and 3; the first of them trains nothing, whoever comes first of the others.
    assert 2.0 <= means(lines)[1] <= 3.0, lines
    text = f"the server has fedstale {fedstale.__version__} and the device 99.0.1"
    assert any(text in line for line in lines), lines
