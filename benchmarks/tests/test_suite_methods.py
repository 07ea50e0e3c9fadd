"""Methods of others that the suite runs: their steps on a case that is worked out another way."""

import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

import fedstale
from fedstale.strategies import StaleStrategy
from fedstale.strategies.types import ClientUpdate

# A method may import the file beside it.
sys.path.append(str(ROOT / "benchmarks" / "suite" / "methods"))
NAMES = ("ace", "aced", "fedasmu", "ringleader", "throttle")
SCENARIO = SimpleNamespace(
    name="tiny", n_devices=5, concurrency=3, buffer_size=2, timeout_s=3600.0, seed=4
)
# Client, version that it trained from, what it changed; a reply a version.
REPLIES = [(1, 0, 4.0), (1, 1, 6.0), (2, 0, -2.0), (1, 2, 8.0), (3, 0, 10.0), (3, 5, 1.0)]


def method(name):
    return import_module(name)


def moves(weighting, replies=REPLIES):
    """Return what each reply moves the model by, and its weight, at rate 1 and one step a reply."""
    theta, found = {"w": np.zeros(2, np.float32)}, []
    for now, (node, base, change) in enumerate(replies):
        delta = {"w": np.full(2, change, np.float32)}
        update = ClientUpdate(
            delta=delta,
            base=theta,
            current=theta,
            node_id=node,
            base_version=base,
            staleness=now - base,
        )
        weight = weighting.weigh(update)
        assert delta["w"][0] == delta["w"][1]
        assert delta["w"].dtype == np.float32
        weighting.observe(theta, theta, 1.0)
        found.append((float(delta["w"][0]), weight))
    return found


def test_ace_steps_by_the_mean_of_a_table_with_one_row_a_client():
    table, expected = np.full(4, np.nan), []
    for node, _, change in REPLIES:
        table[node] = change
        expected.append(np.nanmean(table))
    found = moves(method("ace").LastOfEach())
    assert [move for move, _ in found] == pytest.approx(expected)
    # The last is (8 or 1 is client 1's and 3's latest) (8 - 2 + 1) / 3.
    assert found[-1] == (pytest.approx(7 / 3), 1.0)


def test_aced_leaves_out_what_began_too_many_versions_ago():
    expected, seen = [], {}
    for now, (node, base, change) in enumerate(REPLIES):
        seen[node] = base, change
        fresh = [change for base, change in seen.values() if base >= now - 2]
        expected.append(np.mean(fresh) if fresh else 0.0)
    found = [move for move, _ in moves(method("ace").LastOfEach(2))]
    assert found == pytest.approx(expected)
    # Client 2 drops out after version 2; at version 4, client 3's own began too early.
    assert found[2:5] == pytest.approx([2.0, 8.0, 8.0])
    bound = method("aced").strategy(SCENARIO, 0.1).weighting.most_age
    assert bound == SCENARIO.n_devices


def test_throttle_weighs_repetitions_by_powers_and_drops_what_was_in_flight():
    weighting = method("throttle").SoftThrottle(3, q=2.0)
    # A round of 1, 1, 2, 1, 3; the next begins with version 5, and what began before it is void.
    late = [(2, 4, 5.0), (2, 7, 5.0), (2, 8, 5.0)]
    found = moves(weighting, [*REPLIES, *late])
    weights = [1 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 3, 1 / 3, 0.0, 1 / 3, 1 / 2]
    assert [weight for _, weight in found] == pytest.approx(weights)
    changes = [change for *_, change in [*REPLIES, *late]]
    assert [move for move, _ in found] == pytest.approx(np.multiply(weights, changes))


def test_ringleader_makes_n_steps_a_round_by_means_of_means():
    replies = [(node, 0, change) for node, change in ((1, 4.0), (1, 8.0), (2, 2.0), (3, 9.0))]
    # All are in the table, so 3 steps: by 3's arrival, by 1's next and by 2's next. In between 3
    # comes again, for the next round, in which 1 and 2 are still missing.
    replies += [(3, 0, 5.0), (1, 0, 0.0), (2, 0, 4.0), (1, 0, 7.0), (2, 0, 1.0), (3, 0, 1.0)]
    means = [
        np.mean([np.mean([4, 8]), 2, 9]),
        np.mean([np.mean([4, 8, 0]), 2, 9]),
        np.mean([np.mean([4, 8, 0]), np.mean([2, 4]), 9]),
        np.mean([7, 1, 5]),
        np.mean([7, 1, np.mean([5, 1])]),
    ]
    expected = [0, 0, 0, means[0], 0, means[1], means[2], 0, means[3], means[4]]
    found = moves(method("ringleader").RingTable(3), replies)
    assert [move for move, _ in found] == pytest.approx(expected)


def test_fedasmu_mixes_by_age_and_by_the_number_of_the_version():
    mu, lam, sigma, iota = 2.0, 3.0, 0.25, 0.5
    weighting = method("fedasmu").DynamicStaleness(mu, lam=lam, sigma=sigma, iota=iota)
    found = moves(weighting)
    for now, ((_, base, change), (move, weight)) in enumerate(zip(REPLIES, found, strict=True)):
        t = now + 1.0
        odds = mu * (lam * np.exp(-0.5 * np.log(t) - sigma * np.log(t - base)) + iota)
        assert weight == pytest.approx(1.0 - 1.0 / (1.0 + odds))
        assert move == pytest.approx(weight * change)
    made = method("fedasmu").strategy(SCENARIO, 3.0)
    assert made.update == "model"
    assert made.server_optimizer.rate == 1.0


@pytest.mark.parametrize("name", ["ace", "ringleader", "throttle"])
def test_what_a_method_remembers_is_in_its_checkpoint(name):
    whole, cut = (method(name).strategy(SCENARIO, 1.0).weighting for _ in range(2))
    expected = moves(whole)
    moves(cut, REPLIES[:3])
    goes_on = method(name).strategy(SCENARIO, 1.0).weighting
    goes_on.load_state_dict(cut.state_dict())
    theta = {"w": np.zeros(2, np.float32)}
    for now, (node, base, change) in list(enumerate(REPLIES))[3:]:
        delta = {"w": np.full(2, change, np.float32)}
        about = {"node_id": node, "base_version": base, "staleness": now - base}
        goes_on.weigh(ClientUpdate(delta=delta, base=theta, current=theta, **about))
        goes_on.observe(theta, theta, 1.0)
        assert float(delta["w"][0]) == expected[now][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_runs_in_a_simulation_and_repeats(name):
    module = method(name)
    assert module.__doc__.split("\n")[0].endswith(".")
    assert "Differences from the paper:" in module.__doc__
    assert 1 <= len(module.RATES) <= 5

    def losses():
        made = module.strategy(SCENARIO, module.RATES[0])
        assert isinstance(made, StaleStrategy)
        run = fedstale.simulate(
            "digits",
            strategy=made,
            traces=f"ideal:{SCENARIO.n_devices}",
            until="12 rounds",
            seed=SCENARIO.seed,
            executor="inline",
        )
        found = run.metrics.query("source == 'server' and name == 'loss'")["value"].tolist()
        assert len(found) == 12
        return found

    first = losses()
    assert first[-1] != first[0]
    assert first == losses()
