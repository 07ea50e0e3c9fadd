"""Smaller messages: which format each has, and arrays that are quantised on their way."""

from fedstale.strategies.messages.codec import LEAST, FormatName, decode, is_quantised, n_bytes
from fedstale.strategies.messages.formats import ByForecast, Format, Messages
from fedstale.strategies.messages.records import (
    COMPACT_RECORD,
    Asked,
    as_text,
    coarse,
    decoded,
    form_of,
    formats_of,
    has_quantised,
    is_stated,
    of_text,
    quantised,
    stated,
    without_asking,
)

__all__ = [
    "COMPACT_RECORD",
    "LEAST",
    "Asked",
    "ByForecast",
    "Format",
    "FormatName",
    "Messages",
    "as_text",
    "coarse",
    "decode",
    "decoded",
    "form_of",
    "formats_of",
    "has_quantised",
    "is_quantised",
    "is_stated",
    "n_bytes",
    "of_text",
    "quantised",
    "stated",
    "without_asking",
]
