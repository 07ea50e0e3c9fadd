"""Columns of the native trace file, and the name and version in its metadata."""

import pyarrow as pa

from fedstale.traces.trace_set import CHANNELS

FORMAT = "fedstale-traces"
VERSION = 1
KEY = b"fedstale"

SCHEMA = pa.schema(
    [
        pa.field("record", pa.string(), nullable=False),
        pa.field("device_id", pa.string()),
        *(
            pa.field(f"{name}_{part}", kind)
            for name in CHANNELS
            for part, kind in (
                ("row", pa.int32()),
                ("shift_s", pa.float64()),
                ("scale", pa.float64()),
            )
            if (name, part) != ("availability", "scale")
        ),
        pa.field("length_s", pa.float64()),
        pa.field("starts_s", pa.list_(pa.float64())),
        pa.field("ends_s", pa.list_(pa.float64())),
        pa.field("values", pa.list_(pa.float32())),
    ]
)
"""Columns of the file; all but `record` are null where they do not apply."""
