"""When clients of the older API are known by what they fail with."""

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from virtual_grid import identity

from fedstale.strategies import OlderClients, Validation
from fedstale.strategies.server.checks import Checks
from fedstale.strategies.types import End, Job, RejectionError


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


@pytest.mark.parametrize("record", [{}, {"other": 1.0}, {"num_examples": [1, 2]}])
def test_a_reply_whose_records_lack_what_they_are_named_for_is_rejected_alone(record):
    stage = OlderClients()
    body = RecordDict(
        {
            "fitres.status": ConfigRecord({"code": 0}),
            "fitres.num_examples": MetricRecord(record),
        }
    )
    stage.incoming(Job(7, "train", base_version=0), body)
    checks = Checks(Validation())
    with identity():
        message = Message(body, reply_to=Message(RecordDict(), 7, "train"))
        with pytest.raises(RejectionError, match="num-examples"):
            checks.measurements(message, node_id=7)
