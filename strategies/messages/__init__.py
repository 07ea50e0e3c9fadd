"""Smaller messages: which format each has, and arrays that are quantised on their way."""

from fedstale.strategies.messages.codec import (
    FORMATS,
    LEAST,
    decode,
    is_quantised,
    n_bytes,
)
from fedstale.strategies.messages.records import (
    COMPACT_RECORD,
    Requested,
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
    "FORMATS",
    "LEAST",
    "Requested",
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
