"""Print what reading recordings found: python -m fedstale.traces.sources PATH..."""

import sys
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.repair_table import table

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m fedstale.traces.sources PATH...")
    try:
        print(table(Path(name) for name in sys.argv[1:]))
    except (TraceError, OSError) as error:
        sys.exit(f"error: {error}")
