"""A Ray cluster on this machine whose nodes see no more of each other than machines do.

The head has no cores: commands run there. Where the system allows it, a node of one core lives in
namespaces of its own: the temporary folder, in which the folders of tests are, is empty for it, and
its processes end together when the first of them is killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

CAN_ISOLATE = (
    subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        check=False,
    ).returncode
    == 0
    if shutil.which("unshare")
    else False
)
_START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
_JOINS_S = 60.0


class Nodes:
    """The cluster: `address`, and nodes that come and go."""

    def __init__(self, *, cores=0):
        """Start the head, with as many cores."""
        # Ray lets its workers wait for everything else, as 15 less important.
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False}
        )
        self.address = self._cluster.address
        self.started = []

    def add(self, *, is_isolated=CAN_ISOLATE, **environment):
        """Start a node, and return it.

        Args:
            is_isolated: whether it sees none of this machine's temporary files.
            environment: variables of its processes.
        """
        before = self.count()
        command = [*_START, f"--address={self.address}", "--dashboard-agent-listen-port=0"]
        if is_isolated:
            own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            words = f'mount -t tmpfs none {tempfile.gettempdir()} && exec "$@"'
            command = [*own, "sh", "-c", words, "sh", *command]
        node = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.started.append(node)
        until = time.monotonic() + _JOINS_S
        while self.count() <= before:
            assert node.poll() is None, "the node ended"
            assert time.monotonic() < until, "the node has not joined"
            time.sleep(0.1)
        return node

    def count(self):
        """Return how many nodes are alive, the head too."""
        return len(self._cluster.global_state._live_node_ids())

    def kill(self, node):
        """Take a node away at once, as a power cut does."""
        # Of a node without namespaces all processes are in one session.
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def shutdown(self):
        """End all nodes."""
        ray.shutdown()
        for node in self.started:
            if node.poll() is None:
                self.kill(node)
        self._cluster.shutdown()


@contextmanager
def cluster(n=2, *, cores=0):
    """Yield a cluster with so many nodes of one core each besides the head."""
    nodes = Nodes(cores=cores)
    try:
        for _ in range(n):
            nodes.add()
        yield nodes
    finally:
        nodes.shutdown()


def sent_to(node):
    """Return the names of folders that were unpacked on an isolated node and are in use."""
    place = Path(f"/proc/{node.pid}/root{tempfile.gettempdir()}/fedstale-nodes-{os.getuid()}")
    return sorted(path.stem for path in place.glob("*.lock") if not path.name.startswith("work-"))


def has_checkpoint(node):
    """Return whether a run on an isolated node has written down what it has done."""
    place = Path(f"/proc/{node.pid}/root{tempfile.gettempdir()}/fedstale-nodes-{os.getuid()}")
    return any(place.rglob("*.checkpoint"))


def sent_here():
    """Return whatever workers have written into this machine's temporary folder."""
    return sorted(Path(tempfile.gettempdir()).glob(f"fedstale-nodes-{os.getuid()}/*"))
