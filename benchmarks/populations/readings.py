"""Print what reading published recordings found, as the page on traces shows it.

Run it with: python benchmarks/populations/readings.py PATH...
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.catalogue import kind_of, read
from fedstale.traces.trace_set import TraceSet

_HEADER = (
    "| file | source | devices | what was read | repaired, filled, dropped or left out |\n"
    "|---|---|---:|---|---|"
)


def table(paths: Iterable[Path]) -> str:
    """Return a Markdown table of some recordings, each read with default options.

    Args:
        paths: files, and folders of mahimahi traces.

    Raises:
        TraceError: one of them cannot be read.
    """
    return "\n".join([_HEADER, *(_row(path) for path in sorted(paths))])


def _row(path: Path) -> str:
    source = kind_of(path)
    traces = read(path, source)
    repairs = "; ".join(f"{n:,} {kind}" for kind, n in traces.repairs.items()) or "nothing"
    return f"| {path.name} | {source} | {traces.n_devices:,} | {_content(traces)} | {repairs} |"


def _content(traces: TraceSet) -> str:
    parts = []
    if traces.availability is not None:
        windows = traces.availability
        hours, logged = (windows.ends - windows.starts).sum() / 3600, windows.logs_s.sum() / 3600
        parts.append(
            f"{windows.starts.size:,} windows of availability, "
            f"{hours:,.1f} h of {logged:,.1f} h logged"
        )
    for name in ("compute", "downlink", "uplink"):
        series = getattr(traces, name)
        if series is None:
            continue
        if series.lengths.size == 1 and traces.n_devices > 1:
            parts.append(f"constant {name}")
        else:
            parts.append(f"{series.lengths.sum() / 3600:,.1f} h of {name}")
    return "; ".join(parts)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python benchmarks/populations/readings.py PATH...")
    try:
        print(table(Path(name) for name in sys.argv[1:]))
    except (TraceError, OSError) as error:
        sys.exit(f"error: {error}")
