"""What may be written where a command asks for traces: a file, or `synthetic:N`."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedstale.errors import TraceError

if TYPE_CHECKING:
    from fedstale.traces import TraceSet

SYNTHETIC_DAYS = 7
_PREFIX = "synthetic:"


def is_generated(spec: str) -> bool:
    """Return whether a word means traces that depend on the seed."""
    return spec.startswith(_PREFIX)


def load(spec: str, *, seed: int) -> "TraceSet":
    """Return the traces that a word on the command line means.

    Args:
        spec: `synthetic:N` for N generated devices over a week, a native .parquet file, or a
            published recording in the format of its authors.
        seed: of generated devices; recordings do not depend on it.

    Raises:
        TraceError: the word means no traces, or they cannot be read.
    """
    if is_generated(spec):
        count = spec.removeprefix(_PREFIX)
        if not (count.isascii() and count.isdecimal() and int(count) >= 1):
            raise TraceError(
                f"traces = {spec!r}: expected synthetic:N, such as synthetic:100, with N >= 1"
            )
        from fedstale.traces.synthetic.generate import synthesise  # noqa: PLC0415 - most traces are files

        return synthesise(int(count), SYNTHETIC_DAYS, seed)
    from fedstale.traces.sources import read  # noqa: PLC0415 - keeps `--help` fast

    if not Path(spec).exists():
        raise TraceError(
            f"traces = {spec!r}: no such file or folder; expected one, or synthetic:N for N "
            "generated devices"
        )
    return read(spec)
