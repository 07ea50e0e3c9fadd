"""Choosing by properties: what an expression means, who is chosen by it, and who states what."""

import logging
from itertools import product

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from known_nodes import RNG

import fedstale
from fedstale.client import ForecastMod
from fedstale.contrib.audit import verify
from fedstale.contrib.audit.record import RECORD
from fedstale.contrib.selectors import Filtered, Quota
from fedstale.contrib.selectors.properties import parsed, truth
from fedstale.errors import ConfigError
from fedstale.strategies.selection import LeastRecent
from fedstale.strategies.types import (
    PROPERTIES_RECORD,
    Candidates,
    History,
    properties_in,
)
from fedstale.traces import TraceSet

VALUES = {"region": ["eu", "us"], "gpu": [False, True], "battery": [0.1, 0.5, 1.0]}


def joined(parts):
    (one, is_one), (other, is_other) = parts
    return st.sampled_from(
        [
            (f"({one} and {other})", lambda of: is_one(of) and is_other(of)),
            (f"({one} or {other})", lambda of: is_one(of) or is_other(of)),
            (f"not ({one})", lambda of: not is_one(of)),
        ]
    )


LEAVES = st.sampled_from(
    [
        ("gpu", lambda of: of["gpu"]),
        ("region == 'eu'", lambda of: of["region"] == "eu"),
        ("region != 'eu'", lambda of: of["region"] != "eu"),
        ("region in ('us', 'jp')", lambda of: of["region"] in ("us", "jp")),
        ("region not in ['us']", lambda of: of["region"] != "us"),
        ("battery > .3", lambda of: of["battery"] > 0.3),
        ("-1 <= battery < 1", lambda of: -1 <= of["battery"] < 1),
        ("'us' == region and gpu", lambda of: of["region"] == "us" and of["gpu"]),
    ]
)
EXPRESSIONS = st.recursive(LEAVES, lambda of: st.tuples(of, of).flatmap(joined), max_leaves=6)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, st.sets(st.sampled_from([*VALUES])))
def test_an_expression_means_what_python_would_and_says_nothing_that_the_unknown_may_change(
    expression, unknown
):
    text, meant = expression
    for values in product(*VALUES.values()):
        of = dict(zip(VALUES, values, strict=True))
        assert truth(parsed(text), of) is meant(of)
        found = truth(parsed(text), {k: None if k in unknown else v for k, v in of.items()})
        others = product(*(v if k in unknown else [of[k]] for k, v in VALUES.items()))
        every = {meant(dict(zip(VALUES, other, strict=True))) for other in others}
        assert found is None or every == {found}


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "'eu'", "region ==", "region = 'eu'", "f()", "__import__('os').x", "a.b == 1"),
        *("a[0] == 1", "lambda: a", "[a for a in b]", "(a := 1)", "a if b else c", "a + 1 > 2"),
        *("a is None", "f'{a}' == 'x'", "b'x' == a", "a == None", "a == 1j", "{a: 1} == b"),
        *(
            "~a",
            "*a",
            "a == 'x'; b",
            "a\n== 'x'",
            "(" * 300 + "a" + ")" * 300,
            "a and " * 300 + "a",
        ),
    ],
)
def test_what_is_no_comparison_of_properties_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"Filtered\.where = .*expected comparisons of properties"
    ):
        Filtered(text)


def nodes(*stated):
    return Candidates.of(range(10, 10 + len(stated)), properties=stated)


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("region == 'eu'", {10, 12}),
        ("region != 'eu'", {11}),
        ("not region == 'eu'", {11}),
        ("region == 'eu' or gpu", {10, 11, 12}),
        ("region == 'eu' and not gpu", {12}),
        # A text is neither more nor less than a number, and equal to none.
        ("region > 3 or not region > 3", set()),
        ("region == 3", set()),
        ("gpu == 1", {10, 11}),
    ],
)
def test_those_are_chosen_of_which_it_is_known_to_be_true(where, chosen):
    every = nodes(
        {"region": "eu", "gpu": True},
        {"region": "us", "gpu": True},
        {"region": "eu", "gpu": False},
        {},
    )
    assert {*Filtered(where).select(every, 9, 0.0, RNG(0))} == chosen


def test_the_other_selector_picks_among_them():
    every = nodes({"gpu": True}, {"gpu": False}, {"gpu": True}, {"gpu": True})
    every._table.columns["picked_at"][:] = 5.0, 1.0, 3.0, 4.0
    assert Filtered("gpu", LeastRecent()).select(every, 2, 9.0, RNG(0)) == [12, 13]


def test_a_name_that_nobody_states_is_said_once_with_those_that_exist(caplog):
    every = nodes({"region": "eu"}, {"gpu": True})
    rule = Filtered("regoin == 'eu'")
    with caplog.at_level(logging.WARNING):
        assert rule.select(every, 1, 0.0, RNG(0)) == rule.select(every, 1, 0.0, RNG(0)) == []
    (said,) = caplog.messages
    assert "no device states regoin; stated are: gpu, region" in said


def test_a_quota_counts_who_is_at_work_and_fills_what_is_missing_first():
    regions = [{"region": name} for name in ("eu", "eu", "eu", "us", "us", "jp")]
    every = nodes(*regions, {})
    quota = Quota("region", 1)
    for seed in range(20):
        picked = quota.select(every, 4, 0.0, RNG(seed))
        assert len({*picked}) == 4
        assert {regions[node - 10]["region"] for node in picked if node < 16} == {"eu", "us", "jp"}
    assert {*quota.select(every, 99, 0.0, RNG(0))} == {*range(10, 17)}
    assert len(quota.select(every, 2, 0.0, RNG(0))) == 2
    # A node of "us" and one of "jp" are at work.
    every.in_flight = every.take(np.array([4, 5]))
    for seed in range(20):
        (first, *_) = quota.select(every.take(np.arange(4)), 2, 0.0, RNG(seed))
        assert first in (10, 11, 12)


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (
            {"region": "eu", "gpu": True, "ram": 4, "battery": 0.5},
            ["region", "gpu", "ram", "battery"],
        ),
        ({"region": "x" * 100, "long": "x" * 101}, ["region"]),
        ({"x" * 101: 1, "ram": 4}, ["ram"]),
        ({"a": float("nan"), "b": float("inf"), "c": b"eu", "d": [1, 2], "e": ["x"]}, []),
        ({f"p{i}": 1 for i in range(33)}, []),
    ],
)
def test_what_is_too_long_too_many_or_no_value_is_left_out(stated, kept):
    found = properties_in(RecordDict({PROPERTIES_RECORD: ConfigRecord(stated)}))
    assert found == {name: stated[name] for name in kept}


def test_a_statement_takes_the_place_of_the_last_and_outlives_a_restart_and_a_larger_table():
    history = History()
    history.stated(7, {"region": "eu", "gpu": True})
    history.stated(7, {"region": "us"})
    for node in range(100, 300):
        history.picked(node, 0.0)
    again = History()
    again.load_state_dict(history.state_dict())
    for known in (history, again):
        found = known.candidates([8, 7]).properties
        assert found.keys() == {"region"}
        assert found["region"].tolist() == [None, "us"]
    # Checkpoints of before have none.
    again.load_state_dict({k: v for k, v in history.state_dict().items() if k != "properties"})
    assert again.candidates([7]).properties == {}


# Whole runs.

REGIONS = {
    f"device-{i:02}": {"region": "eu" if i % 3 else "us", "room": "attic"} for i in range(12)
}
STRATEGY = "FedBuff(4, 2, selector=Filtered(\"region == 'eu'\"), stages=[ForecastRequest()])"


def ran(folder, strategy=STRATEGY, of=("region",), **options):
    app = ForecastMod(properties=of).client_app()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 20})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    return fedstale.simulate(
        app,
        traces=TraceSet.ideal(12),
        node_config=REGIONS,
        strategy=strategy,
        initial_arrays={"w": np.zeros(2)},
        until="8 rounds",
        out=folder,
        **{"work_per_example": 0.5, "epochs": 1, "examples": 20, **options},
    )


def trained(run):
    jobs = run.jobs[run.jobs.kind == "train"]
    return {int(name[7:]) for name in jobs.device_id.astype(str)}


def test_devices_of_one_region_train_and_all_are_asked(tmp_path):
    run = ran(tmp_path / "run")
    assert trained(run) <= {i for i in range(12) if i % 3}
    assert len(trained(run)) > 4
    assert run.jobs[run.jobs.kind == "query.forecast"].device_id.nunique() == 12


def test_a_device_states_what_it_is_told_to_and_nothing_else(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(History, "stated", lambda self, node, said: seen.append(said))
    ran(tmp_path / "some", "FedBuff(4, 2)", of=("region", "battery", "charging", "color"))
    # These devices have no battery, and none has a color; nobody asked for the room.
    assert {tuple(said) for said in seen} == {("region",)}
    seen.clear()
    ran(tmp_path / "none", "FedBuff(4, 2)", of=())
    assert seen == []


def test_without_a_statement_nobody_is_chosen_and_the_run_says_why(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert ran(tmp_path / "run", of=("room",)).summary["status"] == "stuck"
    assert any("no device states region; stated are: room" in said for said in caplog.messages)


def test_an_audit_makes_the_picks_again(tmp_path):
    audited = STRATEGY.replace("ForecastRequest()", "ForecastRequest(), AuditRecord()")
    checked = verify(ran(tmp_path / "run", audited).folder / RECORD)
    assert (checked.faults, checked.why_not) == ((), "")
    assert checked.repeated == checked.picks > 3
