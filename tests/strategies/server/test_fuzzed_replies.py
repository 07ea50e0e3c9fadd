"""Replies that a search by coverage has found (`tests/fuzzer.py`), and what it begins with."""

import zipfile
from pathlib import Path

import fuzzed_replies
import numpy as np
import pytest
from fuzzed_replies import seeds, tried
from virtual_grid import content, record

from fedstale.flower import bytes_of_records

pytestmark = pytest.mark.usefixtures("_identity")

KEPT = Path(fuzzed_replies.__file__).with_suffix(".zip")


def test_no_reply_that_was_found_hurts_the_server():
    with zipfile.ZipFile(KEPT) as file:
        outcomes = [tried(file.read(name)) for name in file.namelist()]
    assert len(outcomes) > 50
    assert ["merged", "merged"] in outcomes
    assert len({reason for outcome in outcomes for reason in outcome}) > 25


def test_what_clients_send_is_taken_in_but_for_what_is_no_update():
    outcomes = [set(tried(data)) for data in seeds()]
    assert outcomes.count({"merged"}) == len(outcomes) - 2


def test_a_reason_that_is_too_long_is_found(monkeypatch):
    data = b"\0" + bytes_of_records(content(record(w=np.zeros(3)), 10))
    assert "merged" not in tried(data)
    monkeypatch.setattr(fuzzed_replies, "MOST_TEXT", 10)
    with pytest.raises(AssertionError):
        tried(data)
