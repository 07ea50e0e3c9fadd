import numpy as np
import pytest

from fedstale.errors import ConfigError, TraceError
from fedstale.traces import TraceSet
from fedstale.traces.forecast.split import draw_parts, split


def test_no_device_is_in_two_parts_and_none_is_left_out(fleet):
    parts = split(fleet, seed=0)
    together = np.concatenate([parts.training, parts.validation, parts.testing])
    np.testing.assert_array_equal(np.sort(together), np.arange(fleet.n_devices))


def test_the_split_follows_from_the_seed(fleet):
    np.testing.assert_array_equal(split(fleet, seed=4).testing, split(fleet, seed=4).testing)
    assert not np.array_equal(split(fleet, seed=4).testing, split(fleet, seed=5).testing)


def test_nothing_learnt_comes_from_a_tested_device_or_a_tested_hour(fleet):
    parts = split(fleet, seed=0)
    training, held_out = draw_parts(fleet, None, n=300, seed=0)
    for examples, allowed in ((training, parts.training), (held_out, parts.validation)):
        assert set(examples.seen.devices) <= set(allowed)
        assert examples.seen.now.max() < parts.turn
        late = examples.seen.now[:, None] + 3600.0 > parts.turn
        assert np.isnan(examples.targets.rates[:, 0, 5:])[late[:, 0]].all()


def test_other_traces_to_stop_on_leave_all_devices_to_learn_from(fleet):
    training, held_out = draw_parts(fleet, fleet.take(np.arange(7)), n=2000, seed=0)
    assert len(set(training.seen.devices)) > 50
    assert set(held_out.seen.devices) <= set(range(7))


def test_too_few_devices_are_one_sentence():
    with pytest.raises(TraceError, match="at least 5"):
        split(TraceSet.ideal(4), seed=0)


@pytest.mark.parametrize("share", [0.0, 1.0, np.nan])
def test_a_share_out_of_range_is_refused(fleet, share):
    with pytest.raises(ConfigError, match="turn_share"):
        split(fleet, seed=0, turn_share=share)
