"""What a registered node may push, tried on Flower's own app with and without the gate."""

import dataclasses
import datetime
import inspect
import logging
import sqlite3
import time
from contextlib import closing
from functools import partial
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from databases import on_disk, write_fresh
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from hostile import SUPERLINK, Device, message, somewhere
from superlink_app import OBJECT, PULL, PUSH, SuperLink
from typer.testing import CliRunner

from fedstale.cli import deploy
from fedstale.cli.main import app as fedstale
from fedstale.deployment import superlink
from fedstale.deployment.long_polls import LongPolls
from fedstale.deployment.superlink import Quotas, guarded

GATE = "fedstale.deployment.superlink"


@pytest.fixture
def open_link():
    return SuperLink(lambda app: app)


@pytest.fixture
def link():
    return SuperLink(guarded)


def order(link, sender=SUPERLINK):
    """Return an order to the victim, as if the SuperLink gave it, or another."""
    return message(link.run_id, sender, link.victim.node_id)


def test_without_the_gate_any_node_gives_orders_to_another(open_link):
    link = open_link
    # Up to Flower 1.42 in the SuperLink's name, and from 1.43 on in its own.
    statuses = {
        sender: link.post(PUSH, link.mallory, link.mallory.pushing(order(link, sender))).status_code
        for sender in (SUPERLINK, link.mallory.node_id)
    }
    (given,) = link.pulled(link.victim)
    assert statuses[given.metadata.src_node_id] == 200
    # And Flower takes a signature again and again, with another body.
    headers = link.mallory.headers()
    for _ in range(2):
        assert link.post(PULL, link.mallory, link.mallory.asking(), headers).status_code == 200


def test_a_node_gives_no_orders_by_any_path_that_leads_to_flowers_handler(link):
    for sender in (SUPERLINK, link.mallory.node_id):
        # Routes match a line break at the end, too.
        for path in (PUSH, f"{PUSH}%0A"):
            answer = link.post(path, link.mallory, link.mallory.pushing(order(link, sender)))
            assert (answer.status_code, answer.json()["detail"][:16]) == (400, "expected a reply")
    assert link.pulled(link.victim) == []


def test_an_order_is_not_hidden_behind_a_reply(link):
    mallory = link.mallory
    reply = message(link.run_id, mallory.node_id, SUPERLINK, reply_to=somewhere())
    for pushed in ((reply, order(link)), (order(link), reply), ()):
        assert link.post(PUSH, mallory, mallory.pushing(*pushed)).status_code == 400
    assert link.pulled(link.victim) == []


def test_a_node_answers_for_itself_alone_and_to_the_superlink_alone(link):
    mallory, victim = link.mallory.node_id, link.victim.node_id
    for src, dst in ((victim, SUPERLINK), (SUPERLINK, SUPERLINK), (mallory, victim)):
        false = message(link.run_id, src, dst, reply_to=somewhere())
        assert link.post(PUSH, link.mallory, link.mallory.pushing(false)).status_code == 400


def given(link, device):
    """Let the SuperLink give a device an order, which it fetches; return the order's id."""
    given = message(link.run_id, SUPERLINK, device.node_id)
    trees = Device.pushing(device, given).message_object_trees
    session = link.state.start_session(link.run_id)
    assert link.state.store_message_and_object_tree(given, trees[0], session)[0]
    (pulled,) = link.pulled(device)
    return pulled.metadata.message_id


def test_an_honest_reply_passes_once(link):
    honest = link.victim
    reply = message(link.run_id, honest.node_id, SUPERLINK, reply_to=given(link, honest))
    headers, pushed = honest.headers(), honest.pushing(reply)
    answer = link.post(PUSH, honest, pushed, headers)
    assert answer.status_code == 200
    assert PushMessagesResponse.FromString(answer.content).session_id
    # Whoever has read it all off the line sends it again, with its body or another one.
    assert link.post(PUSH, honest, pushed, headers).status_code == 503
    assert link.post(PULL, honest, honest.asking(), headers).status_code == 503
    assert link.replies(reply.metadata.reply_to_message_id) == [reply.metadata.message_id]


def test_a_used_signature_stays_used_however_it_is_written(link):
    headers = link.victim.headers()
    assert link.post(PULL, link.victim, link.victim.asking(), headers).status_code == 200
    again = [*headers.items()]
    other = datetime.datetime.now(datetime.UTC).isoformat()
    # Flower reads the first of two headers.
    doubled = [*again, ("flwr-timestamp", other), ("flwr-public-key", "AAAA")]
    assert link.post(PULL, link.victim, link.victim.asking(), doubled).status_code == 503
    assert link.post(PULL, link.victim, link.victim.asking()).status_code == 200


@pytest.mark.parametrize(("ago_s", "status"), [(61.0, 503), (59.0, 503), (50.0, 200)])
def test_what_may_have_been_used_before_a_restart_does_not_count_after_it(ago_s, status):
    link = SuperLink(partial(guarded, since=time.monotonic() - 60.0))
    # A stamp may be 5 s early, so one of a little after the start may be from before it.
    at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
    headers = link.mallory.headers(at)
    assert link.post(PULL, link.mallory, link.mallory.asking(), headers).status_code == status


@pytest.mark.parametrize("used", [False, True])
def test_a_superlink_knows_whether_its_database_was_used_before(used, tmp_path, monkeypatch):
    database = tmp_path / "private" / "superlink.db"
    database.parent.mkdir(mode=0o700)
    if used:
        write_fresh(database)
    given, turns = [], []
    # Nothing listens, and this process keeps its clock, its database and its modes.
    settings = SimpleNamespace(
        host="", port=0, ssl_keyfile=None, ssl_certfile=None, enable_supernode_auth=False
    )
    for name, stand_in in {
        "guarded": lambda app, quotas, *, since, **_: given.append(since),
        "uvicorn": SimpleNamespace(Config=lambda app, **_: app),
        "_Server": lambda config, polls: SimpleNamespace(run=lambda **_: None),
        "_make_room": lambda: None,
    }.items():
        monkeypatch.setattr(superlink, name, stand_in)
    for name, stand_in in {
        "app_of": lambda arguments: (None, settings),
        "take_turns": lambda: turns.append(True),
    }.items():
        monkeypatch.setattr(superlink.flower, name, stand_in)
    monkeypatch.setattr(superlink.os, "umask", lambda mode: 0)
    before = time.monotonic()
    superlink.run(["--database", str(database)])
    (since,) = given
    assert turns == [True]
    assert (since is not None and since >= before) if used else since is None


def test_signatures_that_no_longer_count_are_forgotten(link, monkeypatch):
    monkeypatch.setattr(superlink.flower, "stamp_window_s", lambda: (5.0, -11.0))
    gate = superlink.FleetGate(None)
    for number in range(100):
        made = datetime.datetime.fromtimestamp(number, datetime.UTC).isoformat()
        stamp = {"flwr-public-key": "AAAA", "flwr-timestamp": made}
        assert not gate._may_be_used(superlink.Headers(stamp))
    assert len(gate._seen) <= 1


def test_a_node_without_a_registered_key_or_in_anothers_name_is_not_heard(link):
    stranger = Device(node_id=link.victim.node_id)
    assert link.post("/v1/fleet/activate-node", stranger, stranger.joining()).status_code == 412
    assert link.post(PULL, stranger, stranger.asking()).status_code == 401
    asking = link.mallory.asking(link.victim.node_id)
    assert link.post(PULL, link.mallory, asking).status_code == 401


# How much a node may send.


def uploaded(link, device, content, order=None):
    """Push a reply with all its objects; return the statuses, and how many were new to Flower."""
    reply = message(
        link.run_id,
        device.node_id,
        SUPERLINK,
        reply_to=order or given(link, device),
        content=RecordDict(content),
    )
    answer = link.post(PUSH, device, device.pushing(reply))
    statuses, stored = [answer.status_code], 0
    if not answer.is_success:
        return statuses, stored
    session = PushMessagesResponse.FromString(answer.content).session_id
    for object_id, made in get_all_nested_objects(reply).items():
        request = PushObjectRequest(
            node=Node(node_id=device.node_id),
            run_id=link.run_id,
            object_id=object_id,
            object_content=made.deflate(),
            session_id=session,
        )
        answer = link.post(OBJECT, device, request)
        statuses.append(answer.status_code)
        if answer.is_success:
            stored += PushObjectResponse.FromString(answer.content).stored
    return statuses, stored


def honest_content(first=0):
    arrays = ArrayRecord({f"w{k}": Array(np.full(150_000, float(first + k))) for k in range(3)})
    metrics = MetricRecord({"num-examples": 10, "loss": [0.5] * 1000})
    return RecordDict({"arrays": arrays, "metrics": metrics, "more": ConfigRecord({"a": 1})})


LIMITS = Quotas(record_bytes=200_000, reply_objects=2_000)
BULK = {
    "a record of more than 200 kB": (
        lambda: {"blob": ConfigRecord({"x": b"x" * 200_001})},
        "record-bytes",
    ),
    "a list of so many numbers": (lambda: {"m": MetricRecord({"x": [0.5] * 25_001})}, "record-"),
    "thousands of records": (
        lambda: {f"r{k}": MetricRecord({"x": k}) for k in range(2_001)},
        "reply-objects",
    ),
}


@pytest.mark.parametrize("what", BULK)
def test_bulk_is_refused_before_flower_stores_it_and_its_node_named(what, caplog):
    content, limit = BULK[what]
    link = SuperLink(lambda app: guarded(app, LIMITS))
    with caplog.at_level(logging.WARNING, "fedstale"):
        statuses, _ = uploaded(link, link.mallory, RecordDict(content()))
    assert 413 in statuses
    (said,) = [record.getMessage() for record in caplog.records if record.name == GATE]
    assert said.startswith(f"node {link.mallory.node_id}: refused: {limit}")
    most = LIMITS.record_bytes if "record" in limit else LIMITS.reply_objects
    assert f" = {most}: got " in said
    # An honest reply still passes, of this node and of another one.
    for device in (link.mallory, link.victim):
        statuses, stored = uploaded(link, device, honest_content())
        assert set(statuses) == {200}
        assert stored


@pytest.mark.parametrize(
    ("quotas", "expected", "said"),
    [
        (Quotas(reply_bytes=2_500_000), 413, "reply-bytes = 2500000: got 3"),
        (Quotas(node_bytes_per_hour=8_000_000), 503, "node-bytes-per-hour = 8000000: got 8"),
        (Quotas(node_replies_per_hour=2), 503, "node-replies-per-hour = 2: got 3"),
        (Quotas(reply_objects=5), 413, "reply-objects = 5: got "),
    ],
    ids=lambda value: "" if isinstance(value, int) else repr(value)[:40],
)
def test_a_node_has_quotas_within_an_hour_and_gets_new_ones_after_it(
    quotas, expected, said, caplog, monkeypatch
):
    link, now = SuperLink(lambda app: guarded(app, quotas)), [1000.0]
    monkeypatch.setattr(superlink, "time", SimpleNamespace(monotonic=lambda: now[0]))
    of_each = "hour" not in said
    with caplog.at_level(logging.WARNING, "fedstale"):
        found = []
        for k in range(4):
            now[0] = 1000.0 + 1199.0 * k
            found.append(uploaded(link, link.mallory, honest_content(3 * k))[0])
    # Two replies fit into the quotas of an hour.
    assert [expected in statuses for statuses in found] == [of_each, of_each, True, True]
    (line,) = [record.getMessage() for record in caplog.records if record.name == GATE]
    assert line.startswith(f"node {link.mallory.node_id}: refused: {said}")
    if not of_each:
        assert expected not in uploaded(link, link.victim, honest_content())[0]
        now[0] = 4601.0
        assert expected not in uploaded(link, link.mallory, honest_content())[0]


def ordered(link, *devices, **arrays):
    """Send an order with some arrays to devices; return their ids."""
    content = {"arrays": ArrayRecord({k: Array(a) for k, a in arrays.items()})} if arrays else {}
    return push(
        link,
        [
            message(link.run_id, SUPERLINK, one.node_id, content=RecordDict(content))
            for one in devices
        ],
    )


def push(link, made):
    """Push messages with their objects, as a ServerApp does; return their ids."""
    headers = {TASK_TOKEN_HEADER: link.token, "content-type": PROTOBUF_MEDIA_TYPE}
    pushing = link.mallory.pushing(*made)
    pushed = PushAppMessagesRequest(
        messages_list=pushing.messages_list, message_object_trees=pushing.message_object_trees
    )
    answer = link.post("/v1/runtime/push-messages", None, pushed, headers)
    told = PushAppMessagesResponse.FromString(answer.content)
    parts = {key: one for each in made for key, one in get_all_nested_objects(each).items()}
    for key in told.objects_to_push:
        part = PushObjectRequest(
            node=Node(node_id=SUPERLINK),
            run_id=link.run_id,
            object_id=key,
            object_content=parts[key].deflate(),
            session_id=told.session_id,
        )
        assert link.post("/v1/runtime/push-object", None, part, headers).is_success
    return told.message_ids


def noise(n_bytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(n_bytes), dtype=np.uint8)


def weights(*n_bytes):
    """Return the content of a reply with arrays of some bytes."""
    return {"arrays": ArrayRecord({f"w{n}": Array(noise(n)) for n in n_bytes})}


MB = 1_000_000


def measuring(app, **quotas):
    return guarded(app, Quotas(**quotas), polls=LongPolls(hold_s=0.0))


def test_a_reply_far_larger_than_what_was_sent_leaves_nothing_in_the_database(tmp_path, caplog):
    link = on_disk(measuring, tmp_path / "link.db")
    mallory, honest = link.mallory, link.victim
    first, second = ordered(link, mallory, honest, w=noise(8_000))

    def size():
        with closing(sqlite3.connect(tmp_path / "link.db")) as opened:
            return opened.execute("SELECT sum(length(content)) FROM objects").fetchone()[0]

    before = size()
    with caplog.at_level(logging.WARNING, "fedstale"):
        statuses, _ = uploaded(link, mallory, weights(*range(2 * MB, 2 * MB + 9)), first)
    assert statuses.count(413) == 9
    # What describes the arrays.
    assert size() - before < 20_000
    (said,) = [record.getMessage() for record in caplog.records if record.name == GATE]
    assert said.startswith(f"node {mallory.node_id}: refused: reply-bytes = 1032")
    # The honest one is four times as large, and as much as a million besides.
    assert set(uploaded(link, honest, weights(900_000, 32_000), second)[0]) == {200}


def of_first_message(link):
    (query,) = ordered(link, link.victim)
    return query, weights(3 * MB)


def of_query_between(link):
    ordered(link, link.mallory, w=noise(MB))
    (query,) = ordered(link, link.victim)
    return query, weights(4 * MB)


def of_larger_message_before(link):
    ordered(link, link.mallory, w=noise(MB))
    (order,) = ordered(link, link.victim, w=noise(9_000))
    return order, weights(3 * MB)


def of_model_that_another_sent(link):
    # The store has it already, so it is never uploaded.
    ordered(link, link.mallory, w=noise(MB))
    link.orders._known.clear()
    link.orders.largest.clear()
    (order,) = ordered(link, link.victim, w=noise(MB))
    assert link.orders.largest[link.run_id] >= MB
    return order, weights(3 * MB)


def of_trees_grown_from_none(link):
    (order,) = ordered(link, link.victim, w=noise(0))
    return order, weights(900_000)


def of_a_model_in_float64(link):
    order = ordered(link, link.mallory, link.victim, w=noise(MB))[1]
    return order, weights(2 * MB, MB)


def of_many_arrays_of_zeros(link):
    # Flower sends one.
    arrays = {f"w{k}": np.zeros(MB, dtype=np.uint8) for k in range(8)}
    (order,) = ordered(link, link.victim, **arrays)
    return order, weights(*range(MB, MB + 8))


HONEST = [
    of_many_arrays_of_zeros,
    of_first_message,
    of_query_between,
    of_larger_message_before,
    of_model_that_another_sent,
    of_trees_grown_from_none,
    of_a_model_in_float64,
]


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.__name__)
def test_an_honest_reply_passes_however_it_compares_with_its_order(case):
    link = measured()
    order, content = case(link)
    statuses, stored = uploaded(link, link.victim, content, order)
    assert set(statuses) == {200}
    assert stored


def measured(**quotas):
    polls = LongPolls(hold_s=0.0)
    link = SuperLink(lambda app: guarded(app, Quotas(**quotas), polls=polls))
    link.orders = polls.orders
    return link


def test_a_run_that_goes_on_over_a_restart_and_one_with_an_option_are_not_measured():
    link = measured()
    link.orders.largest[link.run_id] = inf
    (order,) = ordered(link, link.victim, w=noise(8_000))
    assert set(uploaded(link, link.victim, weights(3 * MB), order)[0]) == {200}
    link = measured(reply_bytes=4 * MB)
    for n, expected in ((3 * MB, {200}), (5 * MB, {200, 413})):
        (order,) = ordered(link, link.victim, w=noise(8_000, n))
        assert set(uploaded(link, link.victim, weights(n), order)[0]) == expected


def test_a_superlink_that_starts_again_knows_which_runs_it_has_not_seen_from_the_first(tmp_path):
    before = on_disk(lambda app: app, tmp_path / "link.db")
    polls = LongPolls(hold_s=0.0)
    guarded(before.app, polls=polls)
    assert polls.orders.largest == {before.run_id: inf}


def test_orders_of_one_push_are_measured_each_by_itself():
    link = measured()
    models = {f"w{k}": noise(500_000, k) for k in range(4)}
    made = [
        message(
            link.run_id,
            SUPERLINK,
            link.victim.node_id,
            content=RecordDict({"arrays": ArrayRecord({k: Array(a)})}),
        )
        for k, a in models.items()
    ]
    push(link, made)
    assert 500_000 <= link.orders.largest[link.run_id] < 510_000
    assert link.orders.n_sent[link.run_id, link.victim.node_id] == 4


def test_equal_pieces_of_an_array_count_each_and_what_cannot_be_read_is_not_measured():
    link = measured()
    ordered(link, link.victim, w=np.zeros(40 * MB, dtype=np.uint8))
    assert 40 * MB <= link.orders.largest[link.run_id] < 41 * MB
    orders = LongPolls().orders
    for content in (
        b"Array a 3\0{}",
        b"ArrayRecord a 3\0[]",
        b"RecordDict a\0{",
        b"Array a 3\0[9]",
    ):
        orders.note(str(content), content)
        assert orders.size(str(content)) == inf
    assert orders.size("of another kind") == 0


def test_a_node_stores_no_more_than_so_much_for_each_message_that_it_was_sent():
    link = measured()
    mallory = link.mallory
    (order,) = ordered(link, mallory, w=noise(8_000))
    # Each is below the limit; Flower takes several uploads for one order.
    found = [uploaded(link, mallory, weights(600_000 + k), order)[0] for k in range(3)]
    assert [413 in statuses for statuses in found] == [False, True, True]


def test_what_is_there_already_does_not_count_again():
    link = measured()
    for k in range(3):
        (order,) = ordered(link, link.victim, w=noise(8_000, k))
        for _ in range(3):
            assert set(uploaded(link, link.victim, weights(900_000), order)[0]) == {200}


def test_quotas_are_options_with_the_same_defaults_and_are_checked():
    options = inspect.signature(deploy.superlink).parameters
    for field in dataclasses.fields(Quotas):
        assert options[field.name].default == field.default
        option = f"--{field.name.replace('_', '-')}"
        refused = CliRunner().invoke(fedstale, ["deploy", "superlink", option, "0"])
        assert (refused.exit_code, "x>=1" in refused.stderr) == (2, True)
        assert option in refused.stderr
