"""When clients of the older API are known by what they fail with."""

import pytest

from fedstale.strategies import OlderClients
from fedstale.strategies.types import End, Job


@pytest.mark.parametrize(
    ("purpose", "how", "reason", "is_on"),
    [
        ("train", "failed", "KeyError: 'fitins.parameters'", True),
        ("evaluate", "failed", "KeyError: 'evaluateins.parameters'", True),
        ("train", "failed", "KeyError: 'evaluateins.parameters'", False),
        ("query", "failed", "AttributeError: no attribute .parameters", False),
        ("train", "lost", "fitins.parameters", False),
    ],
)
def test_only_a_failed_training_or_evaluation_that_names_its_record_turns_it_on(
    purpose, how, reason, is_on
):
    stage = OlderClients(is_on=False)
    stage.ended(Job(0, purpose, base_version=0), End(how, reason))
    assert stage.is_on == is_on
