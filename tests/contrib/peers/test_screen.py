"""Screening at a site: which models it combines, how they count, and what it keeps."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from virtual_grid import identity, record

from fedstale.client import PackMod
from fedstale.contrib.peers import ScreenMod
from fedstale.errors import ConfigError
from fedstale.strategies.robust import Krum, Median, TrimmedMean
from fedstale.strategies.server import pack, unpack
from fedstale.strategies.weighting import polynomial

MEAN = TrimmedMean(f=0)


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def adding_app(*mods, extra=None):
    """Return an app that adds 1 to the floating-point arrays of its model."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        (name,) = message.content
        sent = {k: a.numpy() for k, a in message.content[name].items()}
        moved = {k: x + 1.0 if x.dtype.kind == "f" else x + 1 for k, x in sent.items()}
        content = RecordDict(
            {name: record(**moved), "metrics": MetricRecord({"num-examples": 1}), **(extra or {})}
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        found = float(message.content["arrays"]["w"].numpy()[0])
        return Message(
            RecordDict({"m": MetricRecord({"num-examples": 1, "found": found})}), reply_to=message
        )

    return app


class Site:
    """Site 0 and its Context."""

    def __init__(self, rule=MEAN, config=None, app=None, **options):
        self.app = app or adding_app(ScreenMod(rule, **options))
        config = {"partition-id": 0} if config is None else config
        self.context = Context(1, 1, config, RecordDict(), {})

    def send(self, peers=None, kind="train", key="arrays", numbers=None, **records):
        """Return the reply to a message of a relay, with models of neighbours by number."""
        peers = peers or {}
        content = {f"peer.{peer}": model for peer, model in peers.items() if model is not None}
        about = {"arrays": key, "peers": list(numbers or peers)}
        content |= records | {"fedstale.relay": ConfigRecord(about)}
        return self.app(Message(RecordDict(content), 1, kind), self.context)

    def begin(self, *w, **others):
        return self.send(arrays=model(*w, **others))


def model(*w, **others):
    return record(w=np.array(w), **others)


def weights(reply, key="arrays"):
    assert not reply.has_error(), reply.error
    return reply.content[key]["w"].numpy().tolist()


def test_a_site_trains_on_from_what_the_rule_makes_of_all_models():
    site = Site(Median(f=1))
    assert weights(site.begin(0.0)) == [1.0]
    assert weights(site.send({1: model(5.0), 2: model(100.0)})) == [6.0]
    # Its own is what it has learnt since.
    assert weights(site.send({1: model(7.0), 2: model(8.0)})) == [8.0]


def test_an_app_is_sent_the_model_alone_under_the_name_that_it_expects():
    site = Site()
    assert weights(site.send(key="net", net=model(0.0)), "net") == [1.0]
    reply = site.send({1: model(3.0)}, key="net")
    assert set(reply.content) == {"net", "metrics", "fedstale.relay"}
    assert weights(reply, "net") == [3.0]


def test_a_reply_states_the_number_of_its_site():
    for config, number in (({"partition-id": 3}, 3), ({"partition-id": 3, "site": 0}, 0)):
        assert Site(config=config).begin(0.0).content["fedstale.relay"]["site"] == number


@pytest.mark.parametrize("config", [{}, {"site": -1}, {"site": "three"}, {"partition-id": True}])
def test_a_site_without_a_number_answers_so(config):
    reply = Site(config=config).begin(0.0)
    assert "expected the number of this site" in reply.error.reason
    assert "--node-config 'site=3'" in reply.error.reason


def test_a_site_with_too_few_neighbours_for_its_rule_answers_so_by_its_number():
    site = Site(TrimmedMean(f=2))
    site.begin(0.0)
    reply = site.send({1: model(1.0), 2: model(1.0)})
    assert "site 0 has 2 neighbours, and TrimmedMean(f=2) needs 5 models" in reply.error.reason


def test_a_rule_must_be_one():
    with pytest.raises(ConfigError, match=r"ScreenMod\.rule = 'median': expected a rule"):
        ScreenMod("median")


def test_messages_of_a_server_without_a_relay_pass_as_they_are():
    site = Site(config={})
    content = RecordDict({"arrays": model(1.0), "peer.1": model(9.0)})
    app = ClientApp(mods=[ScreenMod(MEAN)])
    seen = []

    @app.train()
    def train(message, context):
        seen.append(dict(message.content))
        return Message(RecordDict(), reply_to=message)

    reply = app(Message(content, 1, "train"), site.context)
    assert seen == [dict(content)]
    assert not reply.content
    assert not site.context.state


def test_a_neighbour_that_has_not_answered_counts_with_the_first_model():
    site = Site(MEAN)
    site.begin(2.0)  # its own is 3
    reply = site.send({1: model(10.0), 2: None})
    assert weights(reply) == [6.0]
    assert reply.content["metrics"]["silent-jobs"] == 1


def test_a_neighbour_whose_model_was_lost_on_its_way_is_left_out():
    site = Site(MEAN)
    site.begin(0.0)  # its own is 1
    assert weights(site.send({1: model(3.0), 2: model(5.0)})) == [4.0]
    reply = site.send({1: model(6.0), 2: None})
    assert weights(reply) == [6.0]
    assert reply.content["metrics"]["screened"] == 2


def test_with_fewer_models_than_the_rule_needs_a_site_goes_on_from_its_own():
    site = Site(Median(f=1))
    site.begin(0.0)
    assert weights(site.send({1: model(1.0), 2: model(1.0)})) == [2.0]
    assert weights(site.send({1: model(90.0), 2: None})) == [3.0]


# Age.


def test_models_count_by_the_own_jobs_done_since_they_were_new():
    site = Site(MEAN, staleness=polynomial(1.0))
    site.begin(0.0)
    old = model(7.0)
    assert weights(site.send({1: old})) == [5.0]  # (1 + 7) / 2 + 1
    # Once old: 1 and 1/2.
    assert weights(site.send({1: old})) == pytest.approx([(5.0 + 7.0 / 2.0) / 1.5 + 1.0])
    own = site.context.state["fedstale.own"]["w"].numpy()[0]
    reply = site.send({1: old})
    assert weights(reply) == pytest.approx([(own + 7.0 / 3.0) / (4.0 / 3.0) + 1.0])
    assert reply.content["metrics"]["silent-jobs"] == 2
    # What is sent again with other bytes is new.
    reply = site.send({1: model(8.0)})
    assert reply.content["metrics"]["silent-jobs"] == 0


def test_no_few_models_dominate_by_their_age():
    site = Site(TrimmedMean(f=1), staleness=polynomial(13.0))
    site.begin(0.0)
    for _ in range(3):
        site.send({1: model(5.0), 2: model(6.0), 3: model(7.0)})
    assert weights(site.send({1: model(100.0), 2: model(6.0), 3: model(7.0)}))[0] < 10.0


def test_a_model_whose_weight_is_nothing_is_left_out():
    site = Site(MEAN, staleness=lambda age: 0.0 if age else 1.0)
    site.begin(0.0)
    assert weights(site.send({1: model(3.0)})) == [3.0]
    assert weights(site.send({1: model(3.0)})) == [4.0]


# What a neighbour may send.

BAD = {
    "NaN": model(np.nan, 0.0),
    "infinity": model(np.inf, 0.0),
    "another shape": model(1.0),
    "another name": record(v=np.zeros(2)),
    "no arrays": ArrayRecord(),
    "complex numbers": record(w=np.array([1 + 2j, 0j])),
}


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_is_none_is_left_out_and_is_one_of_the_f(name, caplog):
    site = Site(Median(f=1))
    site.begin(0.0, 0.0)  # its own is 1
    # Of one honest neighbour and one that is bad, two are left, of which none need lie.
    assert weights(site.send({1: model(3.0, 3.0), 2: BAD[name]})) == [3.0, 3.0]
    assert "site 0 leaves out the model of site 2: " in caplog.text


def test_a_rule_that_has_enough_models_without_a_bad_one_withstands_as_many_as_before():
    site = Site(TrimmedMean(f=1))
    site.begin(0.0)  # its own is 1
    peers = {1: model(4.0), 2: model(100.0), 3: model(np.nan)}
    assert weights(site.send(peers)) == [5.0]


def test_of_several_records_in_a_reply_those_of_the_model_count():
    others = {"more": model(50.0), "second": MetricRecord({"num-examples": 2})}

    def more(message, context, call_next):
        reply = call_next(message, context)
        reply.content = RecordDict({"more": others["more"], **reply.content, **others})
        return reply

    site = Site(app=adding_app(ScreenMod(MEAN), more))
    reply = site.begin(0.0)
    assert site.context.state["fedstale.own"]["w"].numpy().tolist() == [1.0]
    assert "screened" in reply.content["metrics"]
    assert "screened" not in reply.content["second"]


@pytest.mark.parametrize("rule", [MEAN, Krum(f=0)])
def test_integer_arrays_stay_the_sites_own(rule):
    site = Site(rule)
    site.begin(0.0, n=np.array(3))
    reply = site.send({1: model(4.0, n=np.array(100))})
    assert reply.content["arrays"]["n"].numpy() == 5


def test_half_precision_stays():
    site = Site(MEAN)
    site.send(arrays=record(w=np.zeros(2, np.float16)))
    reply = site.send({1: record(w=np.ones(2, np.float16))})
    assert reply.content["arrays"]["w"].dtype == "float16"


# What it keeps.


def test_a_site_evaluates_what_it_has_screened_last():
    site = Site(MEAN)
    site.begin(4.0)
    site.send({1: model(7.0)})
    reply = site.send(kind="evaluate")
    assert reply.content["m"]["found"] == 6.0
    assert "fedstale.relay" not in reply.content


def test_a_site_that_has_trained_nothing_evaluates_what_it_is_sent():
    assert Site(MEAN).send(kind="evaluate", arrays=model(4.0)).content["m"]["found"] == 4.0


def test_a_lost_context_is_an_error_until_the_relay_sends_the_models_again():
    site = Site(MEAN)
    peers = {1: model(3.0)}
    assert "site 0 keeps no model" in site.send(peers).error.reason
    again = {"arrays": model(0.0), "peer.0": model(9.0)}
    assert weights(site.send(peers, **again)) == [7.0]
    assert weights(site.send({1: model(9.0)})) == [9.0]


def test_a_site_keeps_the_first_model_no_longer_than_a_neighbour_is_silent():
    site = Site(MEAN)
    site.begin(0.0)
    site.send({1: model(3.0), 2: None})
    assert set(site.context.state.array_records) == {
        "fedstale.first",
        "fedstale.screened",
        "fedstale.own",
    }
    site.send({1: model(3.0), 2: model(3.0)})
    assert set(site.context.state.array_records) == {"fedstale.screened", "fedstale.own"}


def test_a_job_that_fails_changes_nothing_that_a_site_keeps():
    app, calls = ClientApp(mods=[ScreenMod(MEAN)]), []

    @app.train()
    def train(message, context):
        calls.append(message.content["arrays"]["w"].numpy()[0])
        if len(calls) == 2:
            return Message(Error(0, "no"), reply_to=message)
        return Message(RecordDict({"arrays": model(calls[-1] + 1.0)}), reply_to=message)

    site = Site(app=app)
    site.begin(0.0)
    before = str(site.context.state)
    assert site.send({1: model(3.0)}).has_error()
    assert str(site.context.state) == before
    assert weights(site.send({1: model(3.0)})) == [3.0]


def test_a_reply_that_holds_a_change_alone_is_refused():
    how = {"how": ConfigRecord({"fedstale.update": "delta"})}
    reply = Site(app=adding_app(ScreenMod(MEAN), extra=how)).begin(0.0)
    assert "expected the whole model beside ScreenMod" in reply.error.reason


def test_packed_messages_are_screened_too():
    site = Site(app=adding_app(PackMod(), ScreenMod(MEAN)))
    content = {
        "arrays": model(0.0),
        "fedstale.relay": ConfigRecord({"arrays": "arrays", "peers": []}),
    }
    site.app(Message(pack(RecordDict(content)), 1, "train"), site.context)
    content = {
        "peer.1": model(3.0),
        "peer.2": model(5.0),
        "fedstale.relay": ConfigRecord({"arrays": "arrays", "peers": [1, 2]}),
    }
    reply = site.app(Message(pack(RecordDict(content)), 1, "train"), site.context)
    assert unpack(reply.content)["arrays"]["w"].numpy() == [4.0]
    assert reply.content["fedstale.relay"]["site"] == 0
