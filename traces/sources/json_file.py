"""JSON files whose every failure is one sentence."""

import json
import re
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.archives import read_file

# JSON may name the halves of a character one by one; a half alone is no text that can be stored.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def load(path: Path) -> object:
    """Return the content of a JSON file, gzipped or not.

    Raises:
        TraceError: the file is missing, empty or not JSON, says one thing twice, or holds half of
            a character.
    """
    data = read_file(path)
    try:
        text = data.decode(json.detect_encoding(data))
        content: object = json.loads(text, object_pairs_hook=_distinct)
        if _HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
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
