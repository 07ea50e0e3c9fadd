"""The rate of false alarms, over as many devices as it takes to see one in a thousand."""

import pytest
from honest_fleets import FLEETS, check_alarms


@pytest.mark.parametrize("fleet", FLEETS)
def test_of_ten_thousand_honest_devices_at_most_ten_alarm_whenever_one_looks(fleet):
    check_alarms(fleet, 10_000)
