"""Three organisations on real SuperNodes: one far away, two killed on the way, each of its rank."""

import re
import socket
import threading
import time
from contextlib import closing, suppress

import pandas as pd
import pytest
from places import APPS, PLAY
from safetensors.numpy import load_file
from safetensors.torch import save_file
from small_deployment import Running

from fedstale.contrib.audit import verify
from fedstale.deployment.commands import Address
from fedstale.deployment.local import LocalDeployment, free_port
from fedstale.simulation.flower_app import FlowerApp
from robustness.kills import kept_alive

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

RANKS, FAR, KILLED, ROUNDS = (2, 4, 8), 2, (0, 1), 60
DELAY_S, BYTES_PER_S = 0.1, 2_000_000
CHUNK = 65_536


class SlowLink:
    """Connections to a port, each byte of which comes later and no faster than a link carries."""

    def __init__(self, to):
        self.port, self.n_bytes, self._to = free_port(), 0, to
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self._listener.close()

    def _serve(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near):
        # A port that nobody has, or has any more, closes the connection, as a router would.
        to = (self._to.host, self._to.port)
        with closing(near), suppress(OSError), closing(socket.create_connection(to)) as far:
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, source, target):
        with suppress(OSError):
            while chunk := source.recv(CHUNK):
                time.sleep(DELAY_S + len(chunk) / BYTES_PER_S)
                self.n_bytes += len(chunk)
                target.sendall(chunk)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def base(tmp_path):
    """Return the path of a small model, on which sites train adapters."""
    app = FlowerApp.find(APPS["letters"])
    with app.importable():
        app.load_client()
        from letters_app import task

        save_file(task.Network(3, width=32, layers=1).state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def evaluations(lines):
    """Return the losses that the server has logged, version by version."""
    found = [re.search(r"version \d+, server: \{'loss': ([\d.]+)", line) for line in lines]
    return [float(match[1]) for match in found if match]


@pytest.mark.skipif(not PLAY.is_file(), reason=f"needs the text {PLAY.name} in ../shared/data")
def test_sites_of_other_ranks_far_away_and_killed_train_one_adapter(base, tmp_path):
    folder = tmp_path / "run"
    config = (
        f"text='{PLAY}' base='{base}' ranks='{','.join(map(str, RANKS))}' width=32 layers=1"
        f" local-steps=4 num-server-rounds={ROUNDS} run-folder='{folder}'"
        f" checkpoints='{tmp_path / 'kept'}'"
        " strategy='FedBuff(3, 2, stages=[Adapters(8), AuditRecord()])'"
    )
    with LocalDeployment(tmp_path / "deployment", nodes=len(RANKS) - 1) as deployment:
        deployment.n_nodes = len(RANKS)
        with SlowLink(deployment.at) as link:
            near, deployment.at = deployment.at, Address("127.0.0.1", link.port)
            deployment.add_node(FAR)
            deployment.at = near
            deployment.wait_online()
            run = Running(deployment, APPS["letters"], config)
            run.until(lambda: len(evaluations(run.lines)) >= 3, limit_s=240.0)
            # The far one alone makes few versions until the SuperLink takes the others back.
            names = [f"node-{i}" for i in KILLED]
            for name in names:
                deployment.processes.kill(name)
            versions_before = len(evaluations(run.lines))
            with kept_alive(deployment, names):
                run.end(limit_s=300.0)
            assert link.n_bytes > 100_000
    losses = evaluations(run.lines)
    assert losses[-1] < losses[0]
    events = pd.read_parquet(folder / "events.parquet")
    merged = events[events["aggregated_version"] > 0]
    assert merged["node_id"].nunique() == len(RANKS)
    assert merged["aggregated_version"].max() == ROUNDS
    for i in KILLED:
        # An id above 2^63 is another number in a column of int64.
        back = merged[merged["device_id"].astype(str) == str(deployment.node_ids[i])]
        assert back["base_version"].max() > versions_before
    # A reply has the bytes of its site's rank.
    sizes = merged.groupby("node_id")["uploaded_bytes"].median().sort_values()
    assert sizes.is_monotonic_increasing
    assert sizes.iloc[-1] > 2.5 * sizes.iloc[0]
    model = load_file(folder / "model.safetensors")
    assert model
    assert all("lora_BA" in name for name in model)
    assert verify(folder).holds
