"""What is checked before anything is sent to a cluster."""

import sys

import pytest
import ray

import fedstale
from fedstale.cluster.connection import check_address, require_same, versions
from fedstale.errors import ConfigError

PLAN = {
    "app": "digits",
    "traces": "synthetic:20",
    "until": "2m",
    "seeds": [1],
    "variants": {"one": {}},
}
NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head-svc.ns:6379", "[::1]:6379"])
def test_an_address_is_auto_or_a_place(address):
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "local", "10.0.0.1", "ray://10.0.0.1:10001", "a b:1", 6379]
)
def test_another_address_is_refused_in_one_sentence(address):
    with pytest.raises(ConfigError, match=r"^address = .*: expected auto, or HOST:PORT"):
        check_address(address)


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs ray, .*\[ray\]"):
        check_address("auto")


@pytest.mark.parametrize("name", ["fedstale", "Python", "Ray", "numpy", "flwr"])
def test_a_version_that_is_another_is_named_with_both(name):
    ours = versions()
    require_same(ours, dict(ours), "node a")
    with pytest.raises(ConfigError, match=rf"^node a has {name} 0\.1\?, and this machine "):
        require_same(ours, {**ours, name: "0.1?"}, "node a")


def test_a_library_that_only_one_has_and_a_node_without_fedstale_are_named():
    ours = versions()
    theirs = {key: value for key, value in ours.items() if key != "numpy"}
    with pytest.raises(ConfigError, match="node a has numpy not installed, and this machine"):
        require_same(ours, theirs, "node a")
    with pytest.raises(ConfigError, match="node a has no fedstale: install version"):
        require_same(ours, {}, "node a")


def test_two_commits_of_one_version_differ():
    version, checksum = versions()["fedstale"].split()
    assert version == fedstale.__version__
    assert len(checksum.strip("()")) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"app": "digit"}, "app = 'digit': expected a directory"),
        ({"executor": "processes"}, "executor = 'processes': with an address each run is one"),
        ({"executor": "ray"}, "executor = 'ray': with an address each run is one"),
    ],
)
def test_a_plan_is_checked_before_anything_is_connected_to(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        fedstale.compare({**PLAN, **changes}, out=tmp_path, address=NOWHERE)
    assert not ray.is_initialized()


def test_a_run_in_the_folder_that_is_another_is_found_before(tmp_path):
    (tmp_path / "runs" / "one" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "1" / "mine.txt").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds something that is no run"):
        fedstale.compare(PLAN, out=tmp_path, address=NOWHERE)
