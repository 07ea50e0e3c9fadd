"""How many jobs an agent has in flight: numbers within bounds, by price and by what is known."""

import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.agents import AgentPace
from fedstale.agents.policy import how_many
from fedstale.errors import ConfigError
from fedstale.strategies import FedAvg, FedBuff, parse
from fedstale.strategies.pace import Progress
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.types import Candidates, SelectionContext


def nodes(rng, n, *, keeps=True):
    step = SelectionContext(keeps_stragglers=keeps)
    told = {
        "examples": rng.integers(0, 90, n).astype(float),
        "loss": rng.uniform(0.0, 3.0, n),
        "duration_s": rng.uniform(1.0, 600.0, n),
        "forecast_p_finish": rng.random(n),
    }
    hidden = {name: np.where(rng.random(n) < 0.4, np.nan, x) for name, x in told.items()}
    return Candidates.of(np.arange(n), step, **hidden)


def drawn(seed):
    return nodes(np.random.default_rng(seed), 30)


def facts_of(candidates, mask, rows=1, **changed):
    known = {"most": 8, "price": 1.0, "fall": 0.5, "version": 9, "keeps_stragglers": True}
    known |= {name: np.full(rows, value) for name, value in changed.items()}
    return how_many.facts(candidates, mask, **known)


def test_facts_of_many_decisions_are_those_of_each():
    rng = np.random.default_rng(0)
    everyone, mask = nodes(rng, 30), rng.random((3, 10)) < 0.6
    together = facts_of(everyone, mask)
    for row in range(3):
        own = everyone.take(np.arange(10 * row, 10 * row + 10)[mask[row]])
        alone = facts_of(own, np.ones((1, len(own)), dtype=bool))
        np.testing.assert_allclose(together[row], alone[0])
    assert together.shape == (3, len(how_many.FACTS))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 40),
    st.integers(1, 500),
    st.floats(1e-6, 1e6),
    st.lists(st.one_of(st.just(np.nan), st.floats(0.0, 1e9)), max_size=4),
)
def test_numbers_are_within_the_schedule_whatever_is_known(seed, n, most, price, losses):
    rng = np.random.default_rng(seed)
    pace = AgentPace(price)
    for version, loss in enumerate([np.nan, *losses]):
        at = Progress(
            version=version,
            concurrency=most,
            buffer_size=1,
            after_step=bool(seed % 2),
            loss=loss,
            find=lambda: nodes(rng, n, keeps=bool(seed % 3)),
        )
        jobs, updates = pace.numbers(at)
        assert 1 <= jobs <= most
        assert 1 <= updates <= jobs


def test_an_hour_that_is_dearer_has_no_fewer_jobs_in_flight():
    for seed in range(20):
        at = Progress(concurrency=20, buffer_size=5, find=partial(drawn, seed))
        found = [AgentPace(price).numbers(at)[0] for price in np.geomspace(0.1, 1000.0, 9)]
        assert found == sorted(found)
        assert found[0] < found[-1]


def test_the_price_is_the_concurrency_unless_it_is_stated():
    at = Progress(concurrency=20, buffer_size=5)
    assert AgentPace().numbers(at) == AgentPace(20.0).numbers(at)
    with pytest.raises(ConfigError, match=r"AgentPace.hour_price = 0.*> 0"):
        AgentPace(0.0)


def test_a_robust_rule_gets_the_updates_that_it_needs():
    at = Progress(concurrency=8, buffer_size=5, after_step=True, least=3)
    jobs, updates = AgentPace(0.01).numbers(at)
    assert jobs >= updates >= 3


def test_a_schedule_that_waits_for_all_still_does():
    assert AgentPace().numbers(Progress(concurrency=8, buffer_size=None))[1] is None


def test_in_a_run_a_cheap_hour_costs_fewer_device_seconds_and_more_time():
    def run(price):
        grid = VirtualGrid({key: adder(1.0, 10.0, train_loss=1.0) for key in range(8)})
        with identity():
            parse(f"FedBuff(8, 4, pace=AgentPace({price}))").start(
                grid, record(w=np.zeros(2)), num_rounds=12
            )
        return sum(message.metadata.message_type == "train" for _, message in grid.sent), grid.now()

    (few, slow), (many, fast) = run(0.1), run(1000.0)
    assert few < many
    assert slow > fast


def test_it_is_described_by_its_price():
    assert "AgentPace(hour_price=4.0, path=None)" in repr(FedBuff(8, 4, pace=AgentPace(4.0)))
    assert FedAvg(8, pace=AgentPace()).run_pace is not None
    assert FedBuff(8, 4, robust=TrimmedMean(f=1), pace=AgentPace()).run_pace is not None


def test_weights_of_ones_own_decide_and_a_text_names_their_file(tmp_path):
    text = (how_many._PACE).read_text(encoding="utf-8")
    own = tmp_path / "own.toml"
    one_job = re.sub(r"(?<=\[jobs\]\none = ).*", "-90.0", text)
    own.write_text(one_job, encoding="utf-8")
    at = Progress(concurrency=20, buffer_size=5)
    assert AgentPace(1e4).numbers(at)[0] > 1
    strategy = parse(f"FedBuff(20, 5, pace=AgentPace(10000, path='{own}'))")
    assert strategy.pace.numbers(at) == (1, 1)


@pytest.mark.parametrize("text", [None, "", "[jobs]\none = 1.0\n", "[jobs]\none = []\n", "a ="])
def test_a_file_without_weights_is_refused_when_the_pace_is_made(tmp_path, text):
    path = tmp_path / "pace.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pace\.toml: expected weights of a pace"):
        AgentPace(path=str(path))
