import json

import numpy as np
import pytest
from places import RECORDINGS

from fedstale.errors import TraceError
from fedstale.traces.sources import speeds

REAL = RECORDINGS / "ai-benchmark-devices.json"
needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not on this machine")


def phone(model, score, **more):
    return {"Model": model, "CPU_F_AI_Score": score, **more}


def read(tmp_path, rows):
    file = tmp_path / "list.json"
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return speeds.read_phones(file)


def rates(traces):
    return traces.compute.value_at(np.arange(traces.n_devices), 0.0).tolist()


def test_the_median_phone_has_speed_one(tmp_path):
    traces = read(tmp_path, [phone("a", "50"), phone("b", "100"), phone("c", 400)])
    assert rates(traces) == [0.5, 1.0, 4.0]
    assert traces.device_ids.tolist() == ["a", "b", "c"]
    assert traces.compute_unit == speeds.PHONES_UNIT


@pytest.mark.parametrize(
    "bad", ["", "n/a", None, "-5", "0", "nan", "inf", True, [1], "1e999", 10**400]
)
def test_a_score_that_is_no_speed_drops_the_phone_and_is_counted(tmp_path, bad):
    traces = read(tmp_path, [phone("a", "50"), phone("b", bad)])
    assert traces.device_ids.tolist() == ["a"]
    assert traces.repairs["dropped: CPU_F_AI_Score is not a number above 0"] == 1


def test_rows_that_are_no_phones_are_dropped_and_counted(tmp_path):
    traces = read(tmp_path, [phone("a", "50"), 7, None, {}, phone("  ", "5"), phone(3, "5")])
    assert traces.n_devices == 1
    assert sum(traces.repairs.values()) == 5


def test_models_listed_twice_are_told_apart_by_chip_then_android_then_memory(tmp_path):
    rows = [
        phone(" S10 ", "1", CPU="X", Android="9", RAM="4GB"),
        phone("S10", "2", CPU="Y", Android="9", RAM="4GB"),
        phone("P30", "3", CPU="K", Android="9", RAM="4GB"),
        phone("P30", "4", CPU="K", Android="10", RAM="4GB"),
        phone("V1", "5", CPU="M", Android="9", RAM="4GB"),
        phone("V1", "6", CPU="M", Android="9", RAM="6GB"),
        phone("V1", "7", CPU="M", Android="9", RAM="6GB"),
        phone("alone", "8", CPU="M"),
    ]
    traces = read(tmp_path, rows)
    assert traces.device_ids.tolist() == [
        "S10, X",
        "S10, Y",
        "P30, K, Android 9",
        "P30, K, Android 10",
        "V1, M, Android 9, 4GB",
        "V1, M, Android 9, 6GB",
        "alone",
    ]
    assert traces.repairs["renamed: model that is listed more than once"] == 7
    assert traces.repairs["dropped: the same phone again"] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("[", "truncated"),
        ("{}", "expected a JSON list"),
        ("[]", "no model with"),
        ('[{"Model": "a"}]', "no model with"),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, content, says):
    with pytest.raises(TraceError, match=says):
        read(tmp_path, content)


@needs_real
def test_all_published_phones_load():
    traces = speeds.read_phones(REAL)
    assert traces.n_devices == 333
    assert np.median(rates(traces)) == pytest.approx(1.0)
