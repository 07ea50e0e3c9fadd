"""Any order of messages, uploads, refusals, steps of the clock and restarts at the gate."""

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fedstale.deployment import superlink
from fedstale.deployment.long_polls import LongPolls
from fedstale.deployment.superlink import FleetGate, Quotas
from fedstale.flower.superlink_grid import PIECE

RUN, HONEST = 7, 1
CEILING, OF_HOUR = 3_000_000, 10_000_000
sizes = st.sampled_from([1, 40_000, 300_000, 700_000, 999_999])
hostile = st.sampled_from([2, 3])


class Gate(RuleBasedStateMachine):
    """A gate before a store that keeps an object once, as Flower's does."""

    def __init__(self):
        super().__init__()
        self.now, self.names, self.kept = 1000.0, itertools.count(), {}
        self.largest, self.n_sent = 0, Counter()
        # Bytes that are stored: in the run since it is measured, and in each upload of an hour.
        self.in_run, self.hours = Counter(), {}
        self.time = patch.object(superlink, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.most = patch.object(superlink, "_MOST_REPLY", CEILING)
        self.time.start(), self.most.start()
        self.start()

    def teardown(self):
        self.time.stop(), self.most.stop()

    def start(self):
        self.orders = LongPolls().orders
        self.orders.read = lambda name: self.kept.get(name, b"")
        quotas = Quotas(node_bytes_per_hour=OF_HOUR)
        self.gate = FleetGate(self.flower, quotas, orders=self.orders)
        self.gate._may_be_used = lambda headers: False

    async def flower(self, scope, receive, send):
        request = scope["state"]["protobuf_request"]
        stored = request.object_id not in self.kept and not self.fails
        if stored:
            self.kept[request.object_id] = request.object_content
        scope["state"]["protobuf_response"] = PushObjectResponse(stored=stored)
        await send({"type": "http.response.start", "status": 200})

    def pushed(self, node, upload, n, name=None, fails=False):
        """Push an object; return the status, and note what was stored."""
        self.fails, statuses = fails, []
        name = name or str(next(self.names))
        request = PushObjectRequest(
            node=Node(node_id=node),
            run_id=RUN,
            session_id=upload,
            object_id=name,
            object_content=PIECE + bytes(n - len(PIECE)) if n > 20 else bytes(n),
        )
        scope = {
            "type": "http",
            "path": "/v1/fleet/push-object",
            "headers": [],
            "state": {"protobuf_request": request},
        }

        async def send(part):
            statuses.append(part.get("status"))

        before = len(self.kept)
        asyncio.run(self.gate(scope, None, send))
        if len(self.kept) > before:
            self.in_run[node] += n if self.is_measured else 0
            if self.gate._hours[node] is not self.hours.get(node, (None,))[0]:
                self.hours[node] = self.gate._hours[node], Counter()
            self.hours[node][1][upload] += n
        return statuses[0]

    @property
    def is_measured(self):
        return 0 < self.largest < float("inf")

    @property
    def limit(self):
        return min(4 * self.largest + 1_000_000, CEILING) if self.is_measured else CEILING

    def send(self, node, n):
        name = f"message {next(self.names)}"
        self.orders._known[name] = n
        self.orders.sent(SimpleNamespace(run_id=RUN, node=node, message_id=name))
        self.largest = max(self.largest, n)
        self.n_sent[node] += 1

    @initialize(n=st.sampled_from([0, 8_000, 400_000]))
    def begin(self, n):
        self.send(2, n)

    @rule(node=hostile, n=st.sampled_from([0, 8_000, 400_000]))
    def order(self, node, n):
        self.send(node, n)

    @rule(
        node=hostile,
        uploads=st.sampled_from(["a", "b", "abcdefgh"]),
        n=sizes,
        times=st.sampled_from([1, 12]),
        fails=st.booleans(),
    )
    def push(self, node, uploads, n, times, fails):
        for upload in uploads * times:
            self.pushed(node, upload, n, fails=fails)

    @precondition(lambda self: self.kept)
    @rule(node=hostile, data=st.data())
    def push_again(self, node, data):
        name = data.draw(st.sampled_from(sorted(self.kept)))
        self.pushed(node, "a", len(self.kept[name]), name)

    @rule(n=st.sampled_from([8_000, 400_000]), share=st.sampled_from([0.1, 0.9, 1.0]))
    def honest_reply(self, n, share):
        # It comes an hour after the one before.
        self.step(3601.0)
        self.send(HONEST, n)
        left, upload = int(self.limit * share), f"honest {next(self.names)}"
        while left:
            size = min(left, 999_999)
            name, left = str(next(self.names)), left - size
            # An upload that fails, and an answer that is lost.
            self.pushed(HONEST, upload, size, name, fails=True)
            for _ in range(2):
                assert self.pushed(HONEST, upload, size, name) == 200

    @rule(by_s=st.sampled_from([1.0, 1800.0, 3601.0]))
    def step(self, by_s):
        self.now += by_s

    @rule(is_new=st.sampled_from([True, True, False]))
    def restart(self, is_new):
        """Start with the run that goes on, or with the first of a new database."""
        self.start()
        for counts in (self.hours, self.in_run, self.n_sent):
            counts.clear()
        self.largest = 0 if is_new else float("inf")
        if not is_new:
            self.orders.largest[RUN] = self.largest

    @invariant()
    def nobody_stores_more_than_its_quota(self):
        for node in (HONEST, 2, 3):
            if self.is_measured:
                assert self.in_run[node] <= self.limit * self.n_sent[node]
            uploads = self.hours.get(node, (None, Counter()))[1]
            assert sum(uploads.values()) <= OF_HOUR
            assert max(uploads.values(), default=0) <= CEILING


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
