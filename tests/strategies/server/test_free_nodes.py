import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.strategies.server.jobs import OpenJobs
from fedstale.strategies.server.runtime import RuntimeGrid
from fedstale.strategies.types import Job, NodeIndex, NodeSet, packed

NODES = [2**63, 11, 7, 3, 5]


class Listing:
    """A grid that lists the nodes online, in any order."""

    def __init__(self, online):
        self.online = online

    def get_node_ids(self):
        return iter(self.online)

    online_nodes = RuntimeGrid.online_nodes


class Keeping:
    """A grid that knows the set of the nodes online, and lists none."""

    everyone = NodeIndex(np.array(NODES, dtype=np.uint64))

    def __init__(self, online):
        self.names = online

    @property
    def online(self):
        return [node for node in NODES if node in self.names]

    @online.setter
    def online(self, nodes):
        self.names = nodes

    def online_nodes(self):
        return NodeSet(self.everyone, packed(np.array([node in self.names for node in NODES])))


def send(open_jobs, node, message_id):
    open_jobs.open(Job(node, "train", 0, message_id=message_id, sent_at=0.0), 9.0)


@pytest.mark.parametrize("kind", [Listing, Keeping])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "accepted", "cancelled", "forget", "look"]),
            st.integers(0, 4),
            st.permutations(NODES),
            st.integers(0, 5),
        ),
        max_size=40,
    )
)
def test_free_nodes_are_those_that_a_walk_over_all_would_find(kind, steps):
    open_jobs, grid, n = OpenJobs(), kind(NODES), 0
    for what, which, order, some in steps:
        jobs = open_jobs.open_jobs("train")
        if what == "send":
            n += 1
            send(open_jobs, NODES[which], f"m{n}")
        elif what == "look":
            grid.online = order[:some]
        elif what == "forget":
            for message_id in list(open_jobs.awaited)[:1]:
                if message_id not in open_jobs.out:
                    open_jobs.forget(message_id)
        elif jobs:
            open_jobs.end(jobs[which % len(jobs)].message_id, what)
        but = set(order[:some]) if which == 0 else set()
        busy = {job.node_id for job in open_jobs.open_jobs("train")}
        busy |= {*open_jobs._recalled.values(), *but}
        expected = [m for m in grid.online if m not in busy]
        assert open_jobs.idle(grid.online_nodes(), but).ids.tolist() == expected


@pytest.mark.parametrize("kind", [Listing, Keeping])
def test_restored_jobs_are_followed(kind):
    open_jobs, restored, online = OpenJobs(), OpenJobs(), kind([3, 5]).online_nodes()
    assert set(restored.idle(online).ids.tolist()) == {3, 5}
    send(open_jobs, 5, "m")
    restored.load_state_dict(open_jobs.state_dict())
    assert restored.idle(online).ids.tolist() == [3]


def test_nodes_are_online_in_the_order_of_the_grid():
    assert Listing([9, 5]).online_nodes().ids.tolist() == [9, 5]
    assert Listing([9, 5]).online_nodes().ids.dtype == np.uint64
    assert Keeping([5, 3]).online_nodes().ids.tolist() == [3, 5]
