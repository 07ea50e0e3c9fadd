"""The scenario that rivals are given is what an event loop written here says it is."""

import heapq
import json
import os

import numpy as np
import pytest

import pages
from rivals import run as rivals
from rivals.run import Answer, compared, read_answer

ours = pytest.importorskip("ours")
UPDATES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rivals")


def seconds_of(made, client):
    """Return the seconds of a job, from the numbers of the file alone."""
    n_bytes = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    work = 20.0 * 4 * made.slowdown[client]
    return work + 2 * n_bytes * 8 / (made.mbit_per_s[client] * 1e6)


def stream(made, updates, buffer_size, waits):
    """Return arrivals, clients, base versions and instants of sending of a server that never waits.

    Args:
        made: the scenario.
        updates: to go on for.
        buffer_size: of a step.
        waits: whether a client whose update is in the buffer waits for the step.
    """
    due = [(seconds_of(made, i), i, 0, 0.0) for i in range(len(made.slowdown))]
    heapq.heapify(due)
    version, buffer, found = 0, [], []
    while len(found) < updates:
        now, client, base, sent_at = heapq.heappop(due)
        found.append((now, client, base, sent_at))
        buffer.append(client)
        if len(buffer) == buffer_size:
            version += 1
        again = [client] if not waits else buffer if len(buffer) == buffer_size else []
        for each in again:
            heapq.heappush(due, (now + seconds_of(made, each), each, version, now))
        if len(buffer) == buffer_size:
            buffer = []
    return found


def rounds(made, updates):
    """Return the arrivals of rounds that wait for all."""
    n, now, found = len(made.slowdown), 0.0, []
    for version in range(updates // n):
        order = sorted(range(n), key=lambda i: seconds_of(made, i))
        found += [(now + seconds_of(made, i), i, version, now) for i in order]
        now += seconds_of(made, order[-1])
    return found


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("FedAsync", {}, lambda made: stream(made, UPDATES, 1, waits=False)),
        ("FedBuff", {}, lambda made: stream(made, UPDATES, 5, waits=False)),
        ("FedBuff", {"distinct": True}, lambda made: stream(made, UPDATES, 5, waits=True)),
        ("FedAvg", {}, lambda made: rounds(made, UPDATES)),
    ],
)
def test_events_are_those_of_an_event_loop(folder, rule, options, expected):
    made = rivals.scenario(rule, 3, folder, updates=UPDATES, options=options)
    answer = ours.run(made)
    found = expected(made)
    assert len(answer.events) == len(found) == UPDATES
    for event, wanted in zip(answer.events, found, strict=True):
        assert tuple(event[1:3]) == wanted[1:3]
        assert event[0] == pytest.approx(wanted[0], abs=1e-6)
        assert event[3] == pytest.approx(wanted[3], abs=1e-6)


def test_the_model_is_what_mixing_update_by_update_gives(folder):
    made = rivals.scenario("FedAsync", 3, folder, updates=UPDATES)
    answer = ours.run(made)
    made.jobs.clear()
    versions = [made.first()]
    for _, client, base, _ in answer.events:
        theirs, now = made.train(client, versions[base]), versions[-1]
        share = 0.6 / (1 + len(versions) - 1 - base) ** 0.5
        versions.append([x + share * (y - x) for x, y in zip(now, theirs, strict=True)])
    for mine, wanted in zip(answer.model, versions[-1], strict=True):
        assert np.abs(mine - wanted).max() < 1e-5
    assert any(base < number for number, (_, _, base, _) in enumerate(answer.events))


def test_a_job_takes_whole_seconds_and_no_two_arrive_together(folder):
    made = rivals.scenario("FedAsync", 4, folder)
    each = [seconds_of(made, i) for i in range(len(made.slowdown))]
    assert np.abs(np.array(each) - np.round(each)).max() < 1e-6
    for waits in (False, True):
        arrived = [event[0] for event in stream(made, 200, 5, waits)]
        assert np.diff(arrived).min() > 0.5


def test_clients_in_flight_are_drawn_as_appfl_draws_them(folder):
    import random

    made = rivals.scenario("FedAsync", 5, folder, in_flight=3, updates=10)
    answer = ours.run(made)
    rng, everyone = random.Random(5), list(range(len(made.slowdown)))
    busy = rng.sample(everyone, 3)
    assert {event[1] for event in answer.events if event[3] == 0} == set(busy)
    for earlier, later in zip(answer.events, answer.events[1:], strict=False):
        assert earlier[0] < later[0]
    for arrived_at, client, *_ in answer.events:
        busy.remove(client)
        busy += rng.sample([i for i in everyone if i not in busy], 1)
        sent = [event[1] for event in answer.events if event[3] == arrived_at]
        assert sent in ([busy[-1]], [])


def write_answer(path, events, **changes):
    np.savez(path.with_suffix(".npz"), np.ones(2), np.zeros(1))
    said = {"version": "1.2", "events": events, "run_s": 2.0, "set_up_s": 0.5, "other_mib": 0.0}
    said |= {"model": path.with_suffix(".npz").name, "peak_mib": 100.5}
    path.write_text(json.dumps(said | changes))


def test_an_answer_is_read_with_its_model(tmp_path):
    write_answer(path := tmp_path / "a.json", [[1.5, 3, 0, 0.0], [2, 4, 1, 1.5]])
    answer, peak = read_answer(path)
    assert answer.events == [(1.5, 3, 0, 0.0), (2, 4, 1, 1.5)]
    assert [array.tolist() for array in answer.model] == [[1.0, 1.0], [0.0]]
    assert (answer.version, answer.run_s, peak) == ("1.2", 2.0, 100.5)


@pytest.mark.parametrize(
    ("events", "why"),
    [([[1.0, 2, 3]], "four parts"), ([[2.0, 1, 0, 0.0], [1.0, 2, 0, 0.0]], "order of arrival")],
)
def test_an_answer_that_makes_no_sense_is_an_error(tmp_path, events, why):
    write_answer(path := tmp_path / "a.json", events)
    with pytest.raises(ValueError, match=why):
        read_answer(path)


def test_answers_are_compared_by_instant_client_version_and_model():
    def answer(events, value):
        return Answer("1", events, [np.full(2, value)], 1.0, 0.0)

    one = answer([(1.0, 0, 0, 0.0), (2.0, 1, 0, 0.0)], 0.5)
    other = answer([(1.0, 0, 0, 0.0), (5.0, 1, 1, 1.0)], 0.25)
    assert compared(one, one) == {
        **{"jobs": 2, "late_s": 0.0, "same_clients": 1.0, "same_versions": 1.0, "apart": 0.0}
    }
    assert compared(one, other) == {
        **{"jobs": 2, "late_s": 3.0, "same_clients": 1.0, "same_versions": 0.5, "apart": 0.25}
    }


def test_where_a_rule_is_the_same_its_page_says_that_the_answers_are():
    found = pages.where(pages.rows("rivals"), part="same")
    same = [row for row in found if not row["note"]]
    assert {row["rival"] for row in same} >= {"appfl", "flgo"}
    for row in same:
        assert row["late_s"] < 1e-3
        assert row["same_versions"] == 1.0
    # Other rules have another model; engines without a clock have the same one. Once rounding has
    # turned the ReLU of a unit, which moves its weights alone.
    equal = [row for row in found if row["note"] in {"", "no clock"}]
    turned = [row for row in equal if row["apart"] >= 1e-5]
    assert [(row["rival"], row["rule"]) for row in turned] == [("flgo", "FedAsync")]
    assert turned[0]["apart"] < 1e-3
    assert all(row["apart"] > 1e-3 for row in found if row["note"] not in {"", "no clock"})
    assert {row["jobs"] // row["seeds"] for row in found} == {rivals.UPDATES}
    assert rivals.N == 20


PYTHONS = dict(each.split("=", 1) for each in os.environ.get("RIVALS", "").split(",") if each)


def beside(name, rule, folder):
    """Return how a rival's answer differs, where there is an environment with it."""
    if name not in PYTHONS:
        pytest.skip(f"needs an environment with {name}: RIVALS={name}=PATH/bin/python")
    made = rivals.scenario(rule, 6, folder, updates=UPDATES)
    rivals.write(made, folder / "in.json")
    rivals.ask(name, PYTHONS[name], [(folder / "in.json", folder / "out.json")])
    return compared(read_answer(folder / "out.json")[0], ours.run(made))


@pytest.mark.parametrize("name", ["appfl", "flgo"])
def test_a_rival_says_the_same_of_a_stream(folder, name):
    found = beside(name, "FedAsync", folder)
    assert found["late_s"] < 1e-3
    assert found["same_versions"] == 1.0
    assert found["apart"] < 1e-5


@pytest.mark.parametrize("name", ["pfl", "flower"])
def test_a_rival_without_a_clock_has_the_same_model_after_rounds(folder, name):
    found = beside(name, "FedAvg", folder)
    assert found["late_s"] is None
    assert found["apart"] < 1e-5
