import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedstale.strategies.ledger import Ledger
from fedstale.strategies.roster import Places, Roster, online_in

NODES = [2**63, 11, 7, 3, 5]


def send(ledger, node, message_id):
    ledger.send(message_id, node_id=node, purpose="train", version=0, now=0.0, timeout_s=9.0)


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
def test_free_nodes_are_those_that_a_walk_over_all_would_find(steps):
    ledger, n = Ledger(), 0
    roster = Roster(ledger)
    online = sorted(NODES)
    for what, which, order, some in steps:
        jobs = ledger.open_jobs("train")
        if what == "send":
            n += 1
            send(ledger, NODES[which], f"m{n}")
        elif what == "look":
            online = order[:some]
        elif what == "forget":
            for message_id in list(ledger.awaited())[:1]:
                if ledger.open_job(message_id) is None:
                    ledger.forget(message_id)
        elif jobs:
            ledger.end(jobs[which % len(jobs)].message_id, what)
        but = set(order[:some]) if which == 0 else set()
        expected = [m for m in online if m not in ledger.busy_nodes and m not in but]
        assert roster.free(np.array(online, dtype=np.uint64), but).tolist() == expected


def test_a_restored_ledger_is_followed():
    ledger, restored = Ledger(), Ledger()
    roster = Roster(restored)
    online = np.array([3, 5], dtype=np.uint64)
    assert roster.free(online).tolist() == [3, 5]
    send(ledger, 5, "m")
    restored.load_state_dict(ledger.state_dict())
    assert roster.free(online).tolist() == [3]


@given(st.lists(st.integers(0, 2**64 - 1), unique=True), st.sets(st.integers(0, 2**64 - 1)))
def test_places_are_found_in_any_order_of_ids(ids, others):
    places = Places(np.array(ids, dtype=np.uint64))
    wanted = [*ids[::2], *others]
    expected = [ids.index(node) for node in wanted if node in set(ids)]
    assert places.of(wanted).tolist() == expected


def test_a_grid_that_has_an_array_of_nodes_is_not_asked_for_a_list():
    class Listing:
        def get_node_ids(self):
            return iter([9, 5])

    class Keeping(Listing):
        nodes = np.array([7, 8], dtype=np.uint64)

        def online_nodes(self):
            return self.nodes

    assert online_in(Listing()).tolist() == [9, 5]
    assert online_in(Listing()).dtype == np.uint64
    assert online_in(Keeping()) is Keeping.nodes
