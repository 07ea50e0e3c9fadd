"""When to send and how many to wait for."""

from math import ceil, inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.errors import ConfigError
from fedstale.strategies import FedAvgOverSelected
from fedstale.strategies.schedule import (
    AdaSync,
    Pace,
    Schedule,
    k_async,
    over_selection,
)


@pytest.mark.parametrize(("loss", "size"), [(4.0, 2), (3.9, 3), (1.0, 4), (0.25, 8), (1e-9, 10)])
def test_the_batch_form_grows_with_the_root_of_the_fall(loss, size):
    assert AdaSync(start=2, most=10).size(first_loss=4.0, loss=loss, concurrency=10) == size


@given(st.integers(1, 30), st.integers(1, 30), st.floats(1e-3, 1e3))
def test_the_worker_form_solves_its_equation(k0, more, fall):
    p = k0 + more
    size = AdaSync(start=k0, most=p, form="worker").size(first_loss=fall, loss=1.0, concurrency=p)
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
        adasync = AdaSync(start=k0, most=16, form=form)
        assert adasync.size(first_loss=0.7, loss=0.7, concurrency=16) == k0


def test_unknown_and_perfect_losses_are_the_two_ends():
    adasync = AdaSync(start=3, most=9)
    assert adasync.size(first_loss=float("nan"), loss=1.0, concurrency=9) == 3
    assert adasync.size(first_loss=1.0, loss=0.0, concurrency=9) == 9
    assert adasync.size(first_loss=1.0, loss=2.0, concurrency=9) == 3
    assert (
        AdaSync(start=4, most=4, form="worker").size(first_loss=9.0, loss=1.0, concurrency=4) == 4
    )


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=50))
def test_a_smoothed_loss_stays_between_its_extremes(losses):
    pace = Pace(k_async(9, AdaSync(most=9)), {"train": 0}, inf)
    for loss in losses:
        pace.learn(loss)
    assert min(losses) * (1 - 1e-9) <= pace.loss <= max(losses) * (1 + 1e-9)
    assert pace.first_loss == losses[0]


def test_over_selection_rounds_up():
    schedule = over_selection(10, 1.25)
    assert (schedule.concurrency, schedule.buffer_size, schedule.stragglers) == (13, 10, "cancel")
    assert sqrt(2) < ceil(sqrt(2))


def test_over_selection_sends_to_three_tenths_more_unless_it_is_told_otherwise():
    assert over_selection(10) == Schedule(concurrency=13, buffer_size=10)
    assert FedAvgOverSelected(10).schedule == over_selection(10)


def test_a_share_of_the_nodes_is_rounded_down_and_at_least_one():
    half, whole = (Pace(Schedule(fraction_train=x), {"train": 0}, inf) for x in (0.5, 1.0))
    assert [half.n_of(n, inf) for n in (1, 2, 5, 10)] == [1, 1, 2, 5]
    assert whole.n_of(7, inf) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaSync(start=0, most=3),
        lambda: AdaSync(start=4, most=3),
        lambda: AdaSync(start=1, most=3, smoothing=1.0),
        lambda: AdaSync(start=1, most=3, form="k"),
        lambda: over_selection(10, 0.5),
        lambda: Schedule(min_available_nodes=0),
        lambda: Schedule(fraction_train=0.0),
        lambda: Schedule(fraction_train=1.5),
        lambda: Schedule(fraction_train=0.5, concurrency=4),
        lambda: Schedule(fraction_train=0.5, buffer_size=2, send="after_reply"),
    ],
)
def test_settings_out_of_range_are_rejected(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
