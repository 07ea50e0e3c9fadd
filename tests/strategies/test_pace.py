"""Jobs in flight and updates of a step, decided for each step; instants are worked out by hand."""

from collections import Counter
from itertools import islice, repeat

import numpy as np
import pytest
from flwr.app import Error
from hypothesis import given
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, adder, record

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies import FedAvg, FedBuff, StaleStrategy, parse
from fedstale.strategies.pace import AdaSync, Pace, Progress, Ramp
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.schedule import (
    Schedule,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    over_selection,
    semi_synchronous,
)
from fedstale.strategies.selection import Random

pytestmark = pytest.mark.usefixtures("_identity")


class Told(Pace):
    """Returns one pair of numbers after the other, the last for ever, and keeps what it saw."""

    def __init__(self, *told):
        self.told, self.seen = told, []

    def numbers(self, at):
        self.seen.append(at)
        return self.told[min(len(self.seen), len(self.told)) - 1]


class Same(Pace):
    def numbers(self, at):
        return at.concurrency, at.buffer_size


def fleet(durations=(1.0,), failing=()):
    """Eight nodes; the i-th training job takes the i-th duration, the last for all later ones."""
    n_sent = [0]

    def node(message, grid):
        if message.metadata.message_type != "train":
            return adder(1.0, 0.25)(message, grid)
        i, n_sent[0] = n_sent[0], n_sent[0] + 1
        seconds = durations[min(i, len(durations) - 1)]
        if i in failing:
            return seconds, Error(0, "gone")
        return adder(1.0, seconds, train_loss=8.0 / (1.0 + i))(message, grid)

    return VirtualGrid({key: node for key in range(8)})


def run(strategy, grid, n=4, **how):
    result = strategy.start(grid, record(w=np.zeros(2)), **{"num_rounds": n, **how})
    sent = Counter(at for at, message in grid.sent if message.metadata.message_type == "train")
    made = {version: now for now, version, source, _ in grid.metrics if "train" in source}
    return sent, list(made.values()), result


KEEPS, CANCELS = k_batch_async, k_batch_sync
CASES = {
    # With 4 out and 2 asked for nothing is sent until 1 is out.
    "after a reply, fewer": (
        *(KEEPS(4, 1), [(4, 1), (2, 1)], [1.0, 2.0, 3.0, 4.0, 10.0], ()),
        *({0.0: 4, 3.0: 1, 4.0: 1}, [1.0, 2.0, 3.0, 4.0, 13.0]),
    ),
    # The second reply of an instant counts in the step that is opened in between.
    "after a reply, more": (
        *(KEEPS(3, 2), [(1, 1), (2, 1), (3, 2)], [1.0], ()),
        *({0.0: 1, 1.0: 2, 2.0: 3, 3.0: 3}, [1.0, 2.0, 3.0, 3.0, 4.0]),
    ),
    "after a reply, more updates than jobs": (
        *(KEEPS(4, 2), [(1, 3)], [1.0], ()),
        *(dict.fromkeys(np.arange(15.0), 1), [3.0, 6.0, 9.0, 12.0, 15.0]),
    ),
    "after a reply, cancelled": (
        *(CANCELS(4, 2), [(4, 2), (1, 1), (2, 1)], [1.0, 1.0, 9.0, 9.0, 1.0], ()),
        *({0.0: 4, 1.0: 1, 2.0: 2, 3.0: 2, 4.0: 2}, [1.0, 2.0, 3.0, 4.0, 5.0]),
    ),
    "after a step, fewer and more": (
        *(k_sync(4, 3), [(4, 3), (2, 2), (3, 1)], [1.0], ()),
        *({0.0: 4, 1.0: 2, 2.0: 3, 3.0: 3, 4.0: 3}, [1.0, 2.0, 3.0, 4.0, 5.0]),
    ),
    # What is late for the first step is in flight still; one job is sent once one of them is back.
    "after a step, kept": (
        *(k_async(4, 2), [(4, 2), (2, 2), (2, 1)], [1.0, 2.0, 5.0, 6.0, 2.0, 1.0], ()),
        *({0.0: 4, 5.0: 1, 6.0: 1, 7.0: 2}, [2.0, 6.0, 7.0, 7.0, 8.0]),
    ),
    # A job that fails is replaced, up to the jobs of the pace.
    "after a step, a job fails": (
        *(k_sync(4, 4), [(2, 2), (1, 1)], [3.0, 1.0, 1.0], (1,)),
        *({0.0: 2, 1.0: 1, 3.0: 1, 4.0: 1, 5.0: 1, 6.0: 1}, [3.0, 4.0, 5.0, 6.0, 7.0]),
    ),
    # So it is where the schedule itself waits for all that were sent, and the other way round.
    "after a step, a job fails that is waited for": (
        *(Schedule(concurrency=4), [(2, 2), (1, 1)], [3.0, 1.0, 1.0], (1,)),
        *({0.0: 2, 1.0: 1, 3.0: 1, 4.0: 1}, [3.0, 4.0, 5.0]),
    ),
    "after a step, a job fails and no other is waited for": (
        *(k_sync(4, 4), [(2, None), (1, 1)], [3.0, 1.0, 1.0], (1,)),
        *({0.0: 2, 3.0: 1, 4.0: 1}, [3.0, 4.0, 5.0]),
    ),
    "all that were sent": (
        *(Schedule(concurrency=4), [(4, None), (1, None), (2, 1)], [1.0, 1.0, 1.0, 2.0, 1.0], ()),
        *({0.0: 4, 2.0: 1, 3.0: 2, 4.0: 2, 5.0: 2}, [2.0, 3.0, 4.0, 5.0, 6.0]),
    ),
    # At the second deadline nothing is there: the step comes with the next reply, and both of it.
    "a deadline": (
        *(semi_synchronous(4, 2.0), [(4, None), (1, None)], [1.0, 1.0, 5.0, 5.0, 1.0], ()),
        *({0.0: 4, 5.0: 1, 6.0: 1, 7.0: 1}, [2.0, 5.0, 6.0, 7.0, 8.0]),
    ),
}


@pytest.mark.parametrize("evaluators", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_jobs_are_sent_and_steps_are_made_by_the_numbers_of_the_pace(name, evaluators):
    schedule, told, durations, failing, sent, made = CASES[name]
    strategy = StaleStrategy(
        schedule=schedule, pace=Told(*told), min_evaluate_nodes=evaluators, seed=1
    )
    found, steps, _ = run(strategy, fleet(durations, failing), n=len(made))
    assert steps == made
    assert dict(found) == sent


SCHEDULES = [
    *(
        Schedule(concurrency=3),
        k_sync(4, 2),
        k_batch_sync(4, 2),
        k_async(4, 2),
        k_batch_async(4, 2),
    ),
    *(k_batch_async(2, 5), over_selection(3), semi_synchronous(4, 2.5)),
    Schedule(
        concurrency=4, buffer_size=2, send="after_reply", distinct=True, min_available_nodes=2
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_pace_with_the_schedules_own_numbers_changes_nothing(schedule):
    def outcome(pace):
        grid = fleet([1.0, 2.5, 1.0, 3.0, 0.5, 4.0, 2.0], (2, 5, 11))
        strategy = StaleStrategy(schedule=schedule, pace=pace, min_evaluate_nodes=1, seed=3)
        *_, result = run(strategy, grid, n=9, timeout=20.0)
        sent = [(at, m.metadata.dst_node_id, m.metadata.group_id) for at, m in grid.sent]
        return sent, grid.merged, grid.refused, grid.metrics, result.arrays["w"].numpy().tolist()

    assert outcome(Same()) == outcome(None)


def test_a_pace_is_asked_once_a_buffer_and_told_where_the_run_stands():
    pace = Told((2, 1))
    _, steps, _ = run(
        StaleStrategy(schedule=k_batch_async(4, 3), pace=pace), fleet([1.0, 3.0, 1.0])
    )
    # The run learns by a copy.
    assert pace.seen == []
    seen, own = [], StaleStrategy(schedule=k_batch_async(4, 3), pace=Seeing())
    own.pace.notes = seen = Notes()
    run(own, fleet([1.0, 3.0, 1.0]))
    assert [(at.version, at.now, at.concurrency, at.buffer_size) for at, *_ in seen] == [
        (version, now, 4, 3) for version, now in enumerate([0.0, *steps])
    ]
    assert [at.n_in_flight for at, *_ in seen] == [0, 1, 1, 1, 0]
    np.testing.assert_array_equal([at.loss for at, *_ in seen][:3], [np.nan, 8.0, 8.0 / 3.0])
    # Who trains is not free.
    assert [(len(free), len(out)) for _, free, out in seen][:3] == [(8, 0), (7, 1), (7, 1)]


def test_free_nodes_are_in_ascending_order_whatever_the_grids():
    grid = fleet()
    grid.online = lambda now: [3, 1, 2]
    pace = Seeing()
    pace.notes = notes = Notes()
    run(StaleStrategy(schedule=k_batch_async(4, 3), pace=pace), grid, n=1)
    assert notes[0][1].tolist() == [1, 2, 3]


class Notes(list):
    """A list that is not copied with the run."""

    def __deepcopy__(self, memo):
        return self


class Seeing(Pace):
    def numbers(self, at):
        self.notes.append((at, at.candidates.node_ids, at.candidates.in_flight.node_ids))
        return 2, 1


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        *((k_batch_async(4, 2), told) for told in [(0, 1), (5, 1), (2, 0), (2, None), (2.0, 1)]),
        *((k_async(4, 2), told) for told in [(2, 3), (True, 1)]),
    ],
)
def test_numbers_that_break_the_contract_end_the_run_in_one_sentence(schedule, told):
    with pytest.raises(FedstaleError, match=r"pace Told.* at version 0: expected 1 to 4 jobs"):
        run(StaleStrategy(schedule=schedule, pace=Told(told)), fleet())


def test_a_step_is_never_too_small_for_a_robust_rule():
    with pytest.raises(FedstaleError, match=r"Ramp\(1, start=1\) returned \(1, 1\).* 3 updates"):
        run(FedBuff(4, 3, robust=TrimmedMean(f=1), pace=Ramp(1)), fleet())
    _, steps, _ = run(FedBuff(4, 3, robust=TrimmedMean(f=1), pace=Ramp(1, 3)), fleet())
    assert steps == [1.0, 2.0, 3.0, 4.0]


def test_a_ramp_has_one_job_more_every_few_versions():
    sent, steps, _ = run(FedBuff(3, 2, pace=Ramp(2)), fleet(), n=6)
    # One job at a time for two steps of one update, then two for two of two, then three.
    assert steps == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [sent[t] for t in steps[:-1]] == [1, 2, 2, 3, 3]


def test_adasync_keeps_between_the_two_ends_of_its_schedule():
    losses, known = [4.0, 0.0], {"concurrency": 4, "buffer_size": 2}
    assert sizes(AdaSync(9, smoothing=0.0), losses, **known) == [2, 9]
    assert sizes(AdaSync(9, smoothing=0.0), losses, after_step=True, **known) == [2, 4]
    with pytest.raises(ConfigError, match=r"AdaSync.most = 1: expected at least buffer_size = 2"):
        run(FedBuff(4, 2, pace=AdaSync(1)), fleet())


def sizes(pace, losses, **known):
    return [pace.numbers(Progress(**known, loss=loss))[1] for loss in losses]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(1, 30))
def test_a_ramp_keeps_to_its_schedule(concurrency, size, every, start):
    numbers = [
        Ramp(every, start).numbers(
            Progress(version=v, concurrency=concurrency, buffer_size=min(size, concurrency))
        )
        for v in range(300)
    ]
    assert numbers == sorted(numbers)
    assert numbers[0][0] == min(start, concurrency)
    assert numbers[-1] == (concurrency, min(size, concurrency))
    assert all(1 <= k <= n for n, k in numbers)


@pytest.mark.parametrize(("loss", "size"), [(4.0, 2), (3.9, 3), (1.0, 4), (0.25, 8), (1e-9, 10)])
def test_the_batch_form_grows_with_the_root_of_the_fall(loss, size):
    pace = AdaSync(10, smoothing=0.0)
    assert sizes(pace, [4.0, loss], concurrency=10, buffer_size=2) == [2, size]


@given(st.integers(1, 30), st.integers(1, 30), st.floats(1e-3, 1e3))
def test_the_worker_form_solves_its_equation(k0, more, fall):
    p = k0 + more
    pace = AdaSync(form="worker", smoothing=0.0)
    size = sizes(pace, [fall, 1.0], concurrency=p, buffer_size=k0)[1]
    right = k0**2 / (p - k0) * fall
    # The largest whole number below the root misses the right side, the one above reaches it.
    if fall <= 1.0:
        assert size == k0
    else:
        assert size == p or size**2 / (p - size) >= right * (1 - 1e-6)
        assert size == k0 or (size - 1) ** 2 / (p - size + 1) < right * (1 + 1e-6)


@pytest.mark.parametrize("form", ["batch", "worker"])
def test_an_unchanged_loss_leaves_the_size_exactly_where_it_started(form):
    for k0 in range(1, 16):
        found = sizes(AdaSync(form=form), islice(repeat(0.7), 5), concurrency=16, buffer_size=k0)
        assert found == [k0] * 5


def test_unknown_and_perfect_losses_are_the_two_ends():
    known = {"concurrency": 9, "buffer_size": 3}
    pace = AdaSync(smoothing=0.0)
    assert sizes(pace, [np.nan, 1.0, 0.0, np.nan, 2.0], **known) == [3, 3, 9, 9, 3]
    full = AdaSync(4, form="worker", smoothing=0.0)
    assert sizes(full, [9.0, 1.0], concurrency=4, buffer_size=4) == [4, 4]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=50))
def test_a_smoothed_loss_stays_between_its_extremes(losses):
    pace = AdaSync()
    sizes(pace, losses, concurrency=9, buffer_size=1)
    assert min(losses) * (1 - 1e-9) <= pace.loss <= max(losses) * (1 + 1e-9)
    assert pace.first_loss == losses[0]


class Both(Random, Pace):
    """A selector that is a pace too, and knows in both what it was told."""

    def __init__(self):
        self.n_asked = 0

    def numbers(self, at):
        self.n_asked += 1
        return 1, 1

    def select(self, candidates, k, now, rng):
        assert self.n_asked == candidates.context.version + 1
        return super().select(candidates, k, now, rng)


def test_a_selector_that_is_a_pace_sets_both_unless_one_is_given():
    sent, steps, _ = run(FedBuff(4, 2, selector=Both()), fleet())
    assert (set(sent.values()), steps) == ({1}, [1.0, 2.0, 3.0, 4.0])
    assert FedBuff(4, 2, selector=Both(), pace=Ramp(5)).run_pace.every == 5
    # Where all nodes are sent to there is nothing to decide.
    assert FedAvg(selector=Both()).run_pace is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("FedAvg(pace=Ramp(5))", "schedule.concurrency = None"),
        ("FedBuff(4, 2, pace=Ramp(0))", "Ramp.every = 0"),
        ("FedBuff(4, 2, pace=3)", "pace = 3: expected a pace such as"),
        ("FedBuff(4, 2, pace=AdaSync(0))", "AdaSync.most = 0"),
        ("FedBuff(4, 2, pace=AdaSync(smoothing=1.0))", "AdaSync.smoothing = 1.0"),
        ("FedBuff(4, 2, pace=AdaSync(form='k'))", "AdaSync.form = 'k'"),
    ],
)
def test_a_pace_that_does_not_suit_is_refused(text, field):
    with pytest.raises(ConfigError, match="expected") as problem:
        parse(text)
    assert field in str(problem.value)


def test_a_pace_is_a_setting_that_a_text_may_hold():
    made = parse("FedBuff(4, 1, pace=Ramp(50))")
    assert made.settings()["pace"] == "Ramp(50, start=1)"
    assert "pace=Ramp(50, start=1)" in repr(made)
    assert repr(parse("REFL(4, 2, pace=pace.AdaSync(form='worker'))").pace) == (
        "AdaSync(most=None, form='worker', smoothing=0.9)"
    )
