"""Print what reading a folder of recordings found: python -m fedstale.traces.sources FOLDER."""

import sys

from fedstale.errors import TraceError
from fedstale.traces.sources.repair_table import table

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fedstale.traces.sources FOLDER")
    try:
        print(table(sys.argv[1]))
    except (TraceError, OSError) as error:
        sys.exit(f"error: {error}")
