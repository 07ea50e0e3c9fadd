"""Smaller messages: which format each has, and arrays that are quantised on their way."""

from fedstale.strategies.messages.codec import (
    FORMATS,
    LEAST,
    bytes_of,
    decode,
    is_quantised,
    n_bytes,
)
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
    "FORMATS",
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
    "n_bytes",
    "quantised",
    "stated",
    "without_asking",
]
