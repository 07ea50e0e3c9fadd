"""A run that is stopped and resumed amid replies of every kind: each update counts exactly once."""

import heapq

import numpy as np
import pytest
from flwr.app.error import Error
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from keeping_grid import Keeping, KeepingGrid, KilledError
from virtual_grid import content, identity, record

from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_batch_async

NODES, SLOTS, TIMEOUT_S, IN_FLIGHT, BUFFER = range(10, 16), 600, 20.0, 4, 3
DELAYS = {
    "reply": 2.0,
    "slow": 4.5,
    "late": 33.0,
    "twice": 1.5,
    "error": 1.0,
    "bad": 0.5,
    "silence": 0.0,
}


class KeepingFrom(Keeping):
    """Dies at a version or after it: several may be made in one instant."""

    def is_due(self, version):
        return version >= self.grid.die_at


class LooseGrid(KeepingGrid):
    """A grid that also hands over what nobody asks for: late replies, and second ones."""

    def __init__(self, nodes, **options):
        super().__init__(nodes, **options)
        self.delivered, self.doubled = [], set()
        self.runtime.checkpointer = KeepingFrom(self)

    def pull_messages(self, message_ids):
        found, self.replies = list(self.replies.values()), {}
        self.delivered += found
        for reply in found:
            if (message_id := reply.metadata.reply_to_message_id) in self.doubled:
                self.doubled.remove(message_id)
                again = self.time + 0.5, len(self.sent), f"again {message_id}", reply
                heapq.heappush(self.heap, again)
        return found


class Runs(RuleBasedStateMachine):
    """Job i adds 1 to element i of the model; whoever has nothing to do replies after 2 s."""

    @initialize()
    def begin(self):
        self.todo, self.gone, self.version = {node: [] for node in NODES}, set(), 0
        self.model = np.zeros(SLOTS)
        nodes = dict.fromkeys(NODES, self.answer)
        self.grid = LooseGrid(nodes, online=lambda now: sorted(set(NODES) - self.gone))

    def answer(self, message, grid):
        todo, slot = self.todo[message.metadata.dst_node_id], len(grid.sent) - 1
        how = todo.pop(0) if todo else "reply"
        arrays = {name: array.numpy().copy() for name, array in message.content["arrays"].items()}
        arrays["w"][slot] += 1.0
        good = content(record(**arrays), train_loss=1.0)
        if how == "twice":
            grid.doubled.add(f"m{slot}")
        answers = {"error": Error(0, "crashed"), "silence": None}
        if how == "bad":
            good = content(record(w=np.full(SLOTS, np.nan)), train_loss=1.0)
        return DELAYS[how], answers.get(how, good)

    @rule(node=st.sampled_from(NODES), how=st.lists(st.sampled_from(sorted(DELAYS)), max_size=3))
    def will(self, node, how):
        self.todo[node] = how

    @rule(node=st.sampled_from(NODES))
    def comes_or_goes(self, node):
        self.gone ^= {node} if len(self.gone) < 2 or node in self.gone else set()

    @rule(versions=st.integers(1, 3))
    def run_to_a_checkpoint_and_die(self, versions):
        self.grid.die_at = self.version + versions
        strategy = StaleStrategy(schedule=k_batch_async(IN_FLIGHT, BUFFER), seed=3)
        with pytest.raises(KilledError):
            strategy.start(
                self.grid, record(w=np.zeros(SLOTS)), num_rounds=10**6, timeout=TIMEOUT_S
            )
        self.version, arrays = self.grid.models[-1]
        self.model = arrays["w"].numpy()

    @precondition(lambda self: self.version)
    @rule(back=st.integers(1, 20))
    def send_a_reply_again(self, back):
        reply = self.grid.delivered[-min(back, len(self.grid.delivered))]
        self.grid.replies[f"again {back}"] = reply

    @invariant()
    def every_update_counts_once(self):
        merged = [int(message_id[1:]) for message_id, _ in self.grid.merged]
        assert len(set(merged)) == len(merged) == BUFFER * self.version
        expected = np.zeros(SLOTS)
        expected[merged] = 1.0 / BUFFER
        np.testing.assert_allclose(self.model, expected, atol=1e-6)

    @invariant()
    def every_job_has_an_ending_or_is_out(self):
        merged = {message_id for message_id, _ in self.grid.merged}
        refused = {message_id for message_id, _ in self.grid.refused}
        assert not merged & {m for m, why in self.grid.refused if not strayed(why)}
        open_still = {f"m{i}" for i in range(len(self.grid.sent))} - merged - refused
        assert len(open_still) < IN_FLIGHT + BUFFER


def strayed(why):
    return "no such job" in why or why.startswith("late")


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
TestRuns = pytest.mark.usefixtures("_identity")(TestRuns)
