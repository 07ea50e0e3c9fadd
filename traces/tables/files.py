"""The rows of a foreign log: CSV in its dialects, JSON, lines of pairs, or Parquet, as a table.

Only what divides the text is found here: the encoding's mark, the separator, where the table begins
and what its columns are called. What the cells mean is told by the options, or found in `columns`
and `values`. A log may be in several files or a folder, one for each device.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from fedstale.errors import TraceError, first_line
from fedstale.traces import Mask
from fedstale.traces.sources import read_file
from fedstale.traces.tables.columns import FILE
from fedstale.traces.tables.words import MISSING, is_datum, unit_of_text

_SEPARATORS = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma", r"\s+": "white space"}
"""From those that nothing but a separator would be, to those that occur in cells too."""
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SAMPLE, _SPARE, _MOST_RAGGED, _MOST_SUMS = 60, 8, 0.05, 4
_PAGES = frozenset([".md", ".pdf", ".html", ".rst"])
_EMPTY = [f(text) for text in MISSING - {"none"} for f in (str.lower, str.upper, str.title)]
_PAIR = re.compile(r'([A-Za-z_][\w.]*)=("(?:[^"\\]|\\.)*"|[^\s,;]+)')
_SYSLOG = re.compile(
    r"^(?:<\d+>\d? ?)?(?P<time>[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) "
    r"(?P<host>\S+) (?P<program>[^\s:\[]+)\S*: (?P<message>.*)$"
)


def open_table(paths: Path | Sequence[Path], separator: str | None = None) -> pd.DataFrame:
    """Return the table in a file, gzipped, xz or not, in a folder of such files, or in several.

    Args:
        paths: the files; of several each has the same columns, and rows are told apart by its name.
        separator: what stands between two cells, a character or its name, such as ";" or "tab";
            None finds out.

    Returns:
        The rows, by the lines of a text file; its attributes tell how it was read ("told") and
        which lines were left out ("repairs").

    Raises:
        TraceError: a file is missing, damaged, or no table.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    files = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    tables = [_open(file, separator) for file in files]
    if len(tables) == 1 and not paths[0].is_dir():
        return tables[0]
    names = [_stem(file) for file in files]
    if len(set(names)) < len(names):
        names = [file.name for file in files]
    frames = [table.assign(**{FILE: n}) for table, n in zip(tables, names, strict=True)]
    whole = pd.concat(frames, keys=names, names=["file"])
    told = {"files": f"{len(files):,}, {names[0]} to {names[-1]}", **tables[0].attrs["told"]}
    repairs = sum((Counter(table.attrs["repairs"]) for table in tables), Counter())
    whole.attrs = tables[0].attrs | {"told": told, "repairs": repairs}
    return whole


def _inside(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith("."))
    if not files:
        raise TraceError(f"{folder}: has no file: expected one for each device")
    # What lies beside them, such as a page about them, has another ending.
    counts = Counter(file.suffix for file in files if file.suffix not in _PAGES)
    usual = counts.most_common(1)[0][0] if counts else files[0].suffix
    return [file for file in files if file.suffix == usual]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".xz").rpartition(".")[0] or path.name


def _open(path: Path, separator: str | None) -> pd.DataFrame:
    data, repairs = read_file(path), dict[str, int]()
    if data.startswith(b"PAR1"):
        try:
            frame = pd.read_parquet(io.BytesIO(data)).rename(columns=str).reset_index(drop=True)
        except (pa.ArrowException, ValueError, OSError) as problem:
            raise TraceError(
                f"{path}: not a readable Parquet file ({first_line(problem)})"
            ) from None
        told = {"file": "Parquet"}
    else:
        text, encoding = _text(path, data)
        records = _records(text) if separator is None else None
        if records is None:
            frame, told, repairs = _of_text(path, text, separator)
            told = {"file": f"text in {encoding}", **told}
        else:
            frame, told = _frame(records[1]), {"file": records[0]}
    year = datetime.fromtimestamp(path.stat().st_mtime, UTC).year
    frame.attrs = {"name": _stem(path), "year": year, "told": told, "repairs": repairs}
    return frame


def _text(path: Path, data: bytes) -> tuple[str, str]:
    mark = next((mark for mark in _MARKS if data.startswith(mark)), b"")
    encoding = _MARKS.get(mark, "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        # Letters of Western Europe; the digits are the same in any of them.
        encoding = "cp1252"
        text = data.decode(encoding, errors="replace")
    if "\0" in text:
        raise TraceError(f"{path}: not a text: expected a CSV, JSON or Parquet file")
    return text.replace("\r\n", "\n").replace("\r", "\n"), encoding


def _records(text: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Return the form and the rows of a text that is no table: JSON, pairs, or lines of a log."""
    start = text.lstrip()[:1]
    if start in ("{", "["):
        try:
            return "JSON", _longest(json.loads(text))
        except ValueError:
            pass
    lines = text.split("\n")
    some = [*islice((line.strip() for line in lines if line.strip()), _SAMPLE)]
    if start == "{" and some[0].endswith("}"):
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                one = json.loads(line) if line.strip() else {}
            except ValueError:
                one = {}
            rows.append(_parts(one)[0] if isinstance(one, dict) else {})
        return "JSON lines", rows
    if all(len(_PAIR.findall(line)) > 1 and _PAIR.match(line) for line in some):
        return "lines of NAME=VALUE", [
            {name: value.strip('"') for name, value in _PAIR.findall(line)} for line in lines
        ]
    if sum(_SYSLOG.match(line) is not None for line in some) > 0.9 * len(some):
        found = (_SYSLOG.match(line.strip()) for line in lines)
        return "lines of a system's log", [one.groupdict() if one else {} for one in found]
    return None


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    texts = [{k: _cell(one) for k, one in row.items() if one is not None} for row in rows]
    frame = pd.DataFrame(texts, index=pd.RangeIndex(1, len(rows) + 1, name="line"), dtype="str")
    return frame.dropna(how="all")


def _cell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _longest(content: object) -> list[dict[str, Any]]:
    """Return the rows of the list in a JSON value that has the most."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path, row in _walk(content, "", {}):
        found.setdefault(path, []).append(row)
    # The innermost of several that are as long says the most.
    if found:
        return max(found.items(), key=lambda item: (len(item[1]), len(item[0])))[1]
    return [_parts(content)[0]] if isinstance(content, Mapping) else []


def _parts(value: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plain values and the lists of a JSON object and of the objects in it."""
    row: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, Mapping):
            inner = _parts(one, f"{prefix}{name}.")
            row, lists = row | inner[0], lists | inner[1]
        elif not isinstance(one, list):
            row[f"{prefix}{name}"] = one
        elif one:
            lists[f"{prefix}{name}"] = one
    return row, lists


def _walk(value: object, path: str, outer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of each list of a JSON value, with what stands around it."""
    if isinstance(value, Mapping):
        if not path and value and all(isinstance(one, Mapping) for one in value.values()):
            for name, one in value.items():
                yield from _walk({"name": name, **one}, "*", outer)
        # What stands around all rows is about the answer, such as its status, and not of a device.
        plain, lists = _parts(value)
        row = outer
        if path:
            row = outer | {(f"{path}.{k}" if k in outer else k): one for k, one in plain.items()}
            yield path, row
        kinds = {tuple(one[0]) for one in lists.values() if isinstance(one[0], Mapping)}
        if len(lists) > 1 and len(kinds) == 1 and all(isinstance(v, list) for v in value.values()):
            # Lists that are alike are each of what they are called.
            for name, inner in lists.items():
                yield from _of_list(inner, f"{path}.*", {**row, "device": name})
            return
        flat = {k: one for k, one in lists.items() if not isinstance(one[0], list | Mapping)}
        if len(flat) > 1 and len({len(one) for one in flat.values()}) == 1:
            # Columns, each a list of its values.
            for cells in zip(*flat.values(), strict=True):
                yield f"{path}.", row | dict(zip(flat, cells, strict=True))
        for name, inner in lists.items():
            width = len(inner[0]) if isinstance(inner[0], list) else 0
            names = next((one for one in flat.values() if len(one) == width), None)
            yield from _of_list(inner, f"{path}.{name}" if path else name, row, names)
    elif isinstance(value, list):
        yield from _of_list(value, path or "rows", outer)


def _of_list(
    inner: list[Any], path: str, row: dict[str, Any], names: list[Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    if all(isinstance(one, Mapping) for one in inner):
        for one in inner:
            yield from _walk(one, path, row)
    elif all(isinstance(one, list) and len(one) == len(inner[0]) for one in inner):
        if names is None:
            names = [f"{path.rpartition('.')[2]}.{k + 1}" for k in range(len(inner[0]))]
            if len(names) == 2 and isinstance(inner[0][0], int | float) and inner[0][0] > 1e9:
                names = ["time", "value"]
        for one in inner:
            yield path, row | dict(zip(names, one, strict=True))


def _of_text(
    path: Path, text: str, separator: str | None
) -> tuple[pd.DataFrame, dict[str, str], dict[str, int]]:
    """Return the table of a text that is divided by a separator, how it was read, and repairs."""
    by_name = {name: character for character, name in _SEPARATORS.items()}
    found = None if separator is None else by_name.get(separator, separator)
    if found is not None and len(found) != 1 and found not in _SEPARATORS:
        raise TraceError(
            f"separator = {separator!r}: expected one character, or one of {', '.join(by_name)}"
        )
    lines = text.split("\n")
    if stated := re.match(r"(?i)sep=(.)\s*$", lines[0]):
        found, lines[0] = found or stated[1], ""
    is_said = [k for k, line in enumerate(lines) if "#" in line and line.lstrip()[0] == "#"]
    said = [lines[k].strip().lstrip("#").strip() for k in is_said]
    for k in is_said:
        lines[k] = ""
    some = [*islice((k for k, line in enumerate(lines) if line.strip()), _SAMPLE)]
    found = found or _separator(path, [lines[k] for k in some])
    rows = {k: _cells(lines[k], found) for k in some}
    names, width, head, before = _layout(rows, [_cells(line, found) for line in said], found)
    last, n_cut = lines[-1], 0
    if last.strip() and len(_cells(last, found)) < width and len(some) > 1:
        n_cut, lines = 1, lines[:-1]
    frame, ragged = _read(path, lines[head:], found, width, head)
    told = {
        "separator": f"{_SEPARATORS.get(found, found)}, {'given' if separator else 'guessed'}",
        "header": "none: columns are called 1, 2, ..." if names is None else ", ".join(names),
    }
    if before:
        told["before the table"] = f"{len(before)} lines, passed over: {lines[before[0]][:40]!r}"
    if last.strip() and not n_cut:
        # It may be whole, or cut inside its last cell: nothing in the file says which.
        told["last line"] = "has no end, read as it is: 25 may be the beginning of 2500"
    names = [*(names or [str(k + 1) for k in range(width)]), *[""] * width][:width]
    kept = [k for k, name in enumerate(names) if name or frame[k].notna().any()]
    frame = frame[kept]
    frame.columns = pd.Index([names[k] or f"column {k + 1}" for k in kept])
    again = (frame == frame.columns).all(axis=1).to_numpy(bool)
    frame = frame[~again].dropna(how="all")
    below = _sums_below(frame)
    repairs = {
        "dropped: last line, which was cut short": n_cut,
        "dropped: line of too many cells": ragged,
        "dropped: line that repeats the header": int(again.sum()),
        "dropped: line of sums below the table": below,
    }
    return frame[: len(frame) - below], told, repairs


def _layout(
    rows: Mapping[int, list[str]], said: list[list[str]], separator: str
) -> tuple[list[str] | None, int, int, list[int]]:
    """Find the names of a table's columns, and where it begins.

    Args:
        rows: cells of the first lines that are not empty, by line.
        said: cells of lines that are comments.
        separator: what divides them.

    Returns:
        The names, None if nothing says them; the number of columns; the first line of the data;
        lines before the table.
    """
    # A table has the number of cells that most lines have; what stands before it is a title.
    counts = [len(row) for row in rows.values()]
    width = max(counts, key=lambda n: (n > 1, counts.count(n)))
    head = next(k for k, row in rows.items() if len(row) == width)
    before = [k for k in rows if k < head]
    if before and len(rows[before[-1]]) == width - 1 and separator == r"\s+":
        return ["1", *rows[before.pop()]], width, head, before
    block = _header(rows, head, width)
    if not block:
        # The last comment before the table may be its header.
        fitting = [cells for cells in said if len(cells) == width and not _is_datum(cells).any()]
        return (fitting[0] if fitting else None), width, head, before
    # Of several lines the first that names each column by itself; units may stand below it.
    distinct = [k for k in block if len(set(filter(None, rows[k]))) == len(rows[k])]
    row = distinct[0] if distinct else block[-1]
    names = rows[row]
    if row != block[-1]:
        units = [unit_of_text(cell) for cell in rows[block[-1]]] + [None] * len(names)
        names = [f"{n} ({u})" if u else n for n, u in zip(names, units, strict=False)]
    return names, max(width, len(names)), block[-1] + 1, before


def _cells(line: str, separator: str) -> list[str]:
    if separator == r"\s+":
        return line.split()
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator), [""])]


def _separator(path: Path, lines: list[str]) -> str:
    """Return the separator that divides most lines into the same number of cells, of several."""
    for separator in _SEPARATORS:
        counts = pd.Series([len(_cells(line, separator)) for line in lines]).value_counts()
        if counts.index[0] > 1 and counts.iloc[0] > 0.5 * len(lines):
            return separator
        # Of a few lines one may be a title, another cut short.
        if len(lines) < 4 and counts.index.max() > 1:
            return separator
    raise TraceError(
        f"{path}: one column in its first line: expected several, with a separator "
        "(--separator) between them"
    )


def _is_datum(cells: list[str]) -> Mask:
    return is_datum(pd.Series(cells, dtype="str")).to_numpy(bool)


def _header(rows: Mapping[int, list[str]], head: int, width: int) -> list[int]:
    """Return the lines that stand above the columns: in a column of numbers they have none."""
    table = [k for k in rows if k >= head and len(rows[k]) >= width - 1]
    data = np.array([_is_datum((rows[k] + [""] * width)[:width]) for k in table])
    late = data[(len(table) + 1) // 2 :] if len(table) > 1 else data
    numeric = late.mean(axis=0) > 0.5
    if not numeric.any():
        return table[:1] if not data[0].any() else []
    block: list[int] = []
    for k, is_number in zip(table, data, strict=True):
        cells = (rows[k] + [""] * width)[:width]
        named = [
            bool(cell) and cell.lower() not in MISSING and not number
            for cell, number in zip(cells, is_number, strict=True)
        ]
        # Hosts may be called by numbers, times are not.
        title = numeric & np.array(named)
        first = int(np.flatnonzero(numeric)[0])
        if not (title[first] and not block) and title.sum() <= numeric.sum() / 2:
            break
        block.append(k)
    return block


def _sums_below(frame: pd.DataFrame) -> int:
    """Return how many last lines have words where all others have numbers or times."""
    if len(frame) < 2 * _MOST_SUMS:
        return 0
    is_number = frame.head(len(frame) // 2).head(_SAMPLE).apply(is_datum).mean() > 0.9
    if not is_number.any():
        return 0
    last = is_datum(frame[is_number.idxmax()])[::-1]
    n = int(last.cumsum().eq(0).sum())
    return n if n <= _MOST_SUMS else 0


def _read(
    path: Path, lines: list[str], separator: str, width: int, above: int
) -> tuple[pd.DataFrame, int]:
    """Return the cells of a table by their lines, and the number of lines with too many."""
    try:
        frame = pd.read_csv(
            io.StringIO("\n".join(lines)),
            sep=separator,
            header=None,
            names=range(width + _SPARE),
            index_col=False,
            dtype="str",
            keep_default_na=False,
            na_values=_EMPTY,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except (ValueError, pd.errors.ParserError) as problem:
        raise TraceError(
            f"{path}: not a table ({first_line(problem)}): expected equally many cells"
        ) from None
    frame.index = pd.RangeIndex(above + 1, above + 1 + len(frame), name="line")
    more = frame.iloc[:, width:].notna().any(axis=1)
    if more.sum() > _MOST_RAGGED * len(frame):
        raise TraceError(
            f"{path}: line {frame.index[more.to_numpy()][0]} has more than {width} cells: expected "
            f"equally many ({more.sum():,} of {len(frame):,} lines are so)"
        )
    return frame.loc[~more].iloc[:, :width], int(more.sum())
