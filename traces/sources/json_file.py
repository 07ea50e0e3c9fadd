"""JSON files whose every failure is one sentence."""

import json
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.archives import read_file


def load(path: Path) -> object:
    """Return the content of a JSON file, gzipped or not.

    Raises:
        TraceError: the file is missing, empty or not JSON, or says one thing twice.
    """
    data = read_file(path)
    try:
        return json.loads(data, object_pairs_hook=_distinct)
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise TraceError(f"{path}: not JSON, or truncated ({reason})") from None


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON, whose later entries must not hide earlier ones."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{twice!r} occurs twice in one object: expected distinct names")
    return made
