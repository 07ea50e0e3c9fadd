"""The benchmark of peers: what liars send, and which cases are counted as close."""

import numpy as np
import pytest
from clothes import write_clothes
from flwr.app import RecordDict
from virtual_grid import identity, record

from fedstale.strategies.types import Job
from lab.kept import Kept
from pages import one, rows, where
from peers import clothes, run
from peers.liars import ATTACKS, Known, Liars


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def test_lies_are_what_the_papers_say():
    before, after = np.zeros((4, 2)), np.array([[1.0, 4.0], [1.0, 2.0], [3.0, 4.0], [3.0, 2.0]])
    own, base = np.array([2.0, 3.0]), np.array([1.0, 1.0])
    known = Known(own, base, before, after, np.random.default_rng(0))
    np.testing.assert_allclose(ATTACKS["sign flip"](known), [-4.0, -9.0])
    np.testing.assert_allclose(ATTACKS["ALIE"](known), [0.5, 1.5])
    np.testing.assert_allclose(ATTACKS["IPM"](known), [-3.0, -5.0])
    assert ATTACKS["random"](known).shape == (2,)


@pytest.mark.parametrize(("of_peers", "base"), [(False, 1.0), (True, 4.0)])
def test_a_liar_starts_from_what_it_is_sent_or_from_the_mean_of_honest_peers(of_peers, base):
    stage = Liars([9], "sign flip", of_peers=of_peers, seed=0)

    def job(node, sent, learnt):
        one = Job(node, "train", 0)
        stage.outgoing(one, RecordDict({"arrays": record(w=np.array([sent]))}))
        reply = RecordDict({"arrays": record(w=np.array([learnt]))})
        stage.incoming(one, reply)
        return reply["arrays"]["w"].numpy()[0]

    assert job(1, 1.0, 3.0) == 3.0
    assert job(2, 1.0, 5.0) == 5.0
    assert job(9, 1.0, 6.0) == base - 5.0 * (6.0 - base)


def test_a_row_is_close_within_three_points_of_its_arms_mean_without_liars(monkeypatch):
    monkeypatch.setattr(run, "ARMS", ("gossip, rounds",))
    monkeypatch.setattr(run, "DESKTOP_ARMS", ())
    monkeypatch.setattr(run, "LIARS", (4,))
    kept = Kept()
    for case in run.cases([1, 2]):
        reached = {"none": 0.9, "ALIE": 0.875}.get(case.attack, 0.5)
        kept.add(list(case), {"accuracy": reached, "worst": reached - 0.01})
    for seed in (1, 2):
        kept.add(["phones", seed], {"three_online": 0.05 * seed, "gossip": 0.2, "server": 0.9})
    *rows, phones = run.rows_of(kept, [1, 2])
    assert phones["three_online"] == pytest.approx(0.075)
    assert {row["rule"] for row in rows} == {"mean", "trimmed mean", "median", "Krum"}
    assert [row["attack"] for row in rows if row["is_close"] and row["rule"] == "mean"] == [
        "none",
        "ALIE",
    ]
    assert not any(row["is_worst_close"] for row in rows if row["attack"] == "ALIE")


@pytest.mark.parametrize("arm", run.ARMS)
def test_a_few_minutes_of_each_arm_learn_digits(arm):
    found = run.run(run.Case(arm, "trimmed mean", 2, "ALIE", 1), until_s=240.0)
    assert found["worst"] <= found["accuracy"]
    assert found["accuracy"] > 0.6
    assert found["gigabytes"] > 0.02 * found["jobs"]


@pytest.mark.slow
def test_sites_learn_clothes_by_two_convolutions(tmp_path, monkeypatch):
    monkeypatch.setattr(clothes, "UNTIL_S", 600.0)
    monkeypatch.setattr(clothes, "TRAIN", 4000)
    monkeypatch.setattr(clothes, "TEST", 200)
    write_clothes(tmp_path, 4200, packed=True)
    case = run.Case("gossip, async", "trimmed mean", 2, "ALIE", 1)
    found = clothes.reached(case, str(tmp_path))
    assert found["worst"] <= found["accuracy"]
    assert found["accuracy"] > 0.3


def test_phones_are_slow_to_learn_by_gossip(monkeypatch):
    monkeypatch.setattr(run, "PHONES_UNTIL_S", 1800.0)
    found = run.phones(1)
    assert 0.0 < found["three_online"] < 0.2
    assert found["gossip"] < 0.5 < found["server"]


def measured(**about):
    return where(rows("site_peers"), **about)


GOSSIP = ["gossip, rounds", "gossip, async"]


class TestWhatThePageSays:
    def test_trimmed_mean_and_median_withstand_what_the_mean_does_not(self):
        for row in measured(arm=GOSSIP, rule=["trimmed mean", "median"]):
            assert row["is_close"], row
        for row in measured(arm=GOSSIP, rule="mean", attack=["sign flip", "random"]):
            before = one(measured(**_case(row, attack="none")), "accuracy")
            assert row["accuracy"] < before - 0.065

    def test_small_lies_cost_sites_less_than_three_points(self):
        for row in measured(arm=GOSSIP, rule=["mean", "trimmed mean", "median"]):
            if row["attack"] in ("ALIE", "IPM"):
                assert (
                    row["accuracy"] > one(measured(**_case(row, attack="none")), "accuracy") - 0.03
                )

    def test_krum_and_bulyan_lose_without_any_attack(self):
        for row in measured(arm=GOSSIP, rule="Krum", attack="none"):
            lost = one(measured(**_case(row, rule="mean")), "accuracy") - row["accuracy"]
            assert 0.03 < lost < 0.085
        for row in measured(arm=GOSSIP, rule="Bulyan", attack="none"):
            lost = one(measured(**_case(row, rule="mean")), "accuracy") - row["accuracy"]
            assert 0.005 < lost < 0.025

    def test_gossip_without_waiting_is_ahead_of_rounds(self):
        for row in measured(arm="gossip, async", rule=["trimmed mean", "median", "Bulyan"]):
            in_rounds = measured(**_case(row, arm="gossip, rounds"))
            assert row["accuracy"] > one(in_rounds, "accuracy")
            assert row["jobs"] > 1.8 * one(in_rounds, "jobs")

    def test_where_sites_come_and_go_gossip_falls_behind_a_server(self):
        for rule, reached in (("trimmed mean", 0.81), ("median", 0.66)):
            gossip, server = (
                one(measured(arm=f"{arm}, desktops", rule=rule, attack="none"), "accuracy")
                for arm in ("gossip", "server")
            )
            assert gossip == pytest.approx(reached, abs=0.005)
            assert server == pytest.approx(0.93, abs=0.005)

    def test_a_server_is_ahead_and_its_messages_are_smaller(self):
        ahead = []
        for row in measured(arm=GOSSIP):
            at_server = _case(row, arm=row["arm"].replace("gossip", "server"))
            ahead.append(one(measured(**at_server), "accuracy") > row["accuracy"])
            if row["rule"] == "mean" and row["attack"] == "none":
                assert one(measured(**at_server), "gigabytes") < 0.4 * row["gigabytes"]
        assert np.mean(ahead) > 0.6

    def test_a_convolutional_network_is_held_by_trimmed_mean_and_median(self):
        for row in rows("site_peers_clothes"):
            if row["rule"] != "mean":
                assert row["is_close"], row
            if row["attack"] == "sign flip" and row["rule"] == "mean":
                assert not row["is_close"]

    def test_what_was_screened_is_better_than_what_was_just_trained(self):
        for row in measured(arm=GOSSIP):
            assert row["accuracy"] > row["own"]


def _case(row, **others):
    return {key: row[key] for key in ("arm", "rule", "liars", "attack")} | others
