"""Which format a forecast leads to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.errors import ConfigError
from fedstale.strategies import ByForecast, FedBuff, selection
from fedstale.strategies.messages.codec import FORMATS, n_bytes

N = 1_000_000
LADDER = [None, *FORMATS]


def bytes_of(form):
    return 4 * N if form is None else n_bytes(form, N)


def forecast(upload_s, before_s):
    return {
        "levels": [0.1, 0.5, 0.9],
        "reporting_s": [0.0, upload_s, 9e9],
        "total_s": [0.0, upload_s + before_s, 9e9],
    }


@given(
    rate=st.floats(1e2, 1e9),
    before_s=st.floats(0.01, 1e4),
    share=st.floats(0.01, 2.0),
    last=st.sampled_from(LADDER),
)
def test_the_format_is_the_finest_that_keeps_to_the_share(rate, before_s, share, last):
    said = forecast(bytes_of(last) / rate, before_s)
    form = ByForecast(share=share).up_of(said, last, bytes_of)
    i = LADDER.index(form)
    if i:
        assert bytes_of(LADDER[i - 1]) / rate > share * before_s * (1 - 1e-6)
    if form != "int2":
        assert bytes_of(form) / rate <= share * before_s * (1 + 1e-6)


def test_the_choice_does_not_depend_on_the_format_that_the_forecast_was_made_with():
    rate, before_s = 1e5, 100.0
    chosen = {
        ByForecast().up_of(forecast(bytes_of(last) / rate, before_s), last, bytes_of)
        for last in LADDER
    }
    assert chosen == {"int8"}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"levels": [0.1, 0.5, 0.9], "reporting_s": [1.0, 2.0, 3.0]},
        {"levels": [0.1, 0.9], "reporting_s": [1.0, 2.0], "total_s": [3.0, 4.0]},
        {"levels": [0.5], "reporting_s": [], "total_s": [3.0]},
        {"levels": 0.5, "reporting_s": 1.0, "total_s": 3.0},
        forecast(np.nan, 1.0),
        forecast(np.inf, 1.0),
        forecast(-1.0, 10.0),
        forecast(5.0, -3.0),
    ],
)
def test_without_a_usable_forecast_it_is_the_first_format(said):
    assert ByForecast().up_of(said, None, bytes_of) == "int8"
    assert ByForecast(first=None).up_of(said, None, bytes_of) is None


def test_stochastic_rounding_is_asked_only_where_it_can_be():
    for upload_s in (0.0, 1.0, 1e9):
        form = ByForecast(stochastic=True).up_of(forecast(upload_s, 1.0), None, bytes_of)
        assert form in ("int8", "int4", "int2")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"share": 0.0}, "messages.share = 0.0: expected a number > 0"),
        ({"share": np.inf}, "messages.share = inf"),
        ({"first": "int3"}, "messages.first = 'int3': expected float16"),
        ({"down": "x"}, "messages.down = 'x'"),
        ({"stochastic": True, "first": "float16"}, "int8|int4|int2 with stochastic=True"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, text):
    with pytest.raises(ConfigError) as raised:
        ByForecast(**settings)
    assert text in str(raised.value)


def test_a_request_that_states_the_bytes_of_replies_contradicts_a_choice_among_them():
    request = selection.ForecastRequest(job={"upload_bytes": 1e6})
    with pytest.raises(ConfigError, match="no upload_bytes with messages=ByForecast"):
        FedBuff(2, 1, messages=ByForecast(), forecast_request=request)
