"""Smaller messages: which format each has, and arrays that are quantised on their way."""

from fedstale.strategies.messages.codec import LEAST, bytes_of, decode, is_quantised
from fedstale.strategies.messages.records import (
    COMPACT_RECORD,
    Requested,
    coarse,
    decoded,
    form_of,
    formats_of,
    has_quantised,
    is_stated,
    quantised,
    stated,
    without_asking,
)

__all__ = [
    "COMPACT_RECORD",
    "LEAST",
    "Requested",
    "bytes_of",
    "coarse",
    "decode",
    "decoded",
    "form_of",
    "formats_of",
    "has_quantised",
    "is_quantised",
    "is_stated",
    "quantised",
    "stated",
    "without_asking",
]
