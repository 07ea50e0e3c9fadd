"""When to send and how many to wait for."""

from math import ceil, inf, sqrt

import pytest

from fedstale.errors import ConfigError
from fedstale.strategies import FedAvgOverSelected
from fedstale.strategies.schedule import Schedule, Standing, over_selection


def test_over_selection_rounds_up():
    schedule = over_selection(10, 1.25)
    assert (schedule.concurrency, schedule.buffer_size, schedule.stragglers) == (13, 10, "cancel")
    assert sqrt(2) < ceil(sqrt(2))


def test_over_selection_sends_to_three_tenths_more_unless_it_is_told_otherwise():
    assert over_selection(10) == Schedule(concurrency=13, buffer_size=10)
    assert FedAvgOverSelected(10).schedule == over_selection(10)


def test_a_share_of_the_nodes_is_rounded_down_and_at_least_one():
    half, whole = (Standing(Schedule(fraction_train=x), {"train": 0}, inf) for x in (0.5, 1.0))
    assert [half.n_of(n, inf) for n in (1, 2, 5, 10)] == [1, 1, 2, 5]
    assert whole.n_of(7, inf) == 7


@pytest.mark.parametrize(
    "make",
    [
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
