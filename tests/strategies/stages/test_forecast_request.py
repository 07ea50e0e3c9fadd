"""Forecast requests: which nodes are asked, how long answers are waited for, what they change."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.app.error import Error
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.selection import ExpectedUtility
from fedstale.strategies.stages import JOB_RECORD, QUERY, ForecastRequest
from fedstale.strategies.types import Candidates


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def node(p=None, *, after_s=1.0, silent=False, failing=False):
    """A node that trains, and answers queries with a chance to finish."""
    train = adder(1.0, 5.0)

    def answer(message, grid):
        if message.metadata.message_type != QUERY:
            return train(message, grid)
        if silent:
            return 0.0, None
        if failing:
            return after_s, Error(0, "no such function")
        said = {} if p is None else {"p_finish": p}
        return after_s, RecordDict({"fedstale.forecast": ConfigRecord(said)})

    return answer


def run(nodes, rounds=1, **options):
    grid = VirtualGrid(nodes)
    strategy = StaleStrategy(
        selector=ExpectedUtility(),
        schedule=Schedule(concurrency=1),
        min_evaluate_nodes=0,
        **options,
    )
    result = strategy.start(grid, record(w=np.zeros(2)), num_rounds=rounds, timeout=600.0)
    sent = [(at, m.metadata.dst_node_id, m.metadata.message_type) for at, m in grid.sent]
    return grid, sent, result


def test_everybody_is_asked_first_and_the_answers_decide():
    nodes = {10: node(0.1), 11: node(0.9, after_s=3.0), 12: node(0.5)}
    grid, sent, _ = run(nodes, stages=[ForecastRequest(job={"work": 7.0, "deadline_s": 60.0})])
    assert [s[1:] for s in sent] == [(10, QUERY), (11, QUERY), (12, QUERY), (11, "train")]
    assert sent[-1][0] == 3.0
    asked = grid.sent[0][1].content
    assert not asked.array_records
    assert dict(asked[JOB_RECORD]) == {"work": 7.0, "deadline_s": 60.0}


def test_who_says_nothing_is_waited_for_and_not_asked_again_at_once():
    nodes = {10: node(silent=True), 11: node(0.9)}
    _, sent, result = run(
        nodes, rounds=3, stages=[ForecastRequest(wait_s=20.0, older_than_s=100.0)]
    )
    queries = [s[:2] for s in sent if s[2] == QUERY]
    assert queries == [(0.0, 10), (0.0, 11)]
    assert [s[0] for s in sent if s[2] == "train"] == [20.0, 25.0, 30.0]
    assert len(result.train_metrics_clientapp) == 3


def test_a_forecast_that_is_too_old_is_asked_for_again():
    _, sent, _ = run({10: node(0.9)}, rounds=4, stages=[ForecastRequest(older_than_s=8.0)])
    assert [s[0] for s in sent if s[2] == QUERY] == [0.0, 11.0]


def test_a_node_that_cannot_answer_is_not_held_to_have_failed():
    grid, sent, _ = run({10: node(failing=True), 11: node(0.9)}, stages=[ForecastRequest()])
    assert [s[1] for s in sent if s[2] == "train"] == [11]
    assert grid.refused == [("m0", "error 0: no such function")]


def test_of_many_the_oldest_are_asked():
    ask = ForecastRequest(older_than_s=10.0, most=2)
    heard = np.array([95.0, np.nan, 50.0, 0.0])
    assert ask.queries(Candidates.of([1, 2, 3, 4], forecast_at=heard), 100.0) == [2, 4]
    # Who was asked has time to answer.
    assert ask.queries(Candidates.of([1, 2, 3, 4], forecast_at=heard), 105.0) == [3, 1]
    assert ask.queries(Candidates.of([]), 100.0) == []


def test_without_asking_nothing_is_sent_but_jobs():
    _, sent, _ = run({10: node(0.9)}, rounds=2)
    assert {s[2] for s in sent} == {"train"}


@pytest.mark.parametrize(
    "options",
    [
        {"job": {"speed": 1.0}},
        {"job": {"work": -1.0}},
        {"older_than_s": 0.0},
        {"wait_s": float("inf")},
        {"most": 0},
    ],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=r"ForecastRequest\."):
        ForecastRequest(**options)
