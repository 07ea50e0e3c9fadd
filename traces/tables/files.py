"""The rows of a foreign log: CSV in its dialects, or Parquet, as a table of pandas.

Only what divides the text is found here: the encoding's mark, the separator, whether there is a
header. What the cells mean is told by the options, or found in `columns` and `values`.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from fedstale.errors import TraceError, first_line
from fedstale.traces import outline
from fedstale.traces.sources import read_file

_SEPARATORS = {"\t": "tab", ";": "semicolon", "|": "bar", ",": "comma", r"\s+": "white space"}
"""From those that nothing but a separator would be, to those that occur in cells too."""
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_DATUM = re.compile(r"[-+]?\d[\d.,:TZ/ +-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it is in a file."""

    frame: pd.DataFrame
    """Its rows, by the lines of a text file."""
    told: Mapping[str, str]
    """How the file was read, in words."""
    n_cut: int
    """Last lines that were cut short, and are left out."""

    __repr__ = outline


def open_table(path: Path, separator: str | None = None) -> Table:
    """Return the table in a CSV, gzipped, xz or not, or in a Parquet file.

    Args:
        path: the file.
        separator: what stands between two cells, a character or its name, such as ";" or "tab";
            None finds out.

    Raises:
        TraceError: the file is missing, damaged, or no table.
    """
    data = read_file(path)
    if data.startswith(b"PAR1"):
        try:
            frame = pd.read_parquet(io.BytesIO(data))
        except (pa.ArrowException, ValueError, OSError) as problem:
            raise TraceError(
                f"{path}: not a readable Parquet file ({first_line(problem)})"
            ) from None
        frame.columns = frame.columns.map(str)
        return Table(frame=frame.reset_index(drop=True), told={"file": "Parquet"}, n_cut=0)
    mark = next((mark for mark in _MARKS if data.startswith(mark)), b"")
    encoding = _MARKS.get(mark, "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text in UTF-8: expected a CSV or Parquet file") from None
    if "\0" in text:
        raise TraceError(f"{path}: not a text: expected a CSV or Parquet file")
    by_name = {name: character for character, name in _SEPARATORS.items()}
    separator = None if separator is None else by_name.get(separator, separator)
    if separator is not None and len(separator) != 1 and separator not in _SEPARATORS:
        raise TraceError(
            f"separator = {separator!r}: expected one character, or one of {', '.join(by_name)}"
        )
    found = separator or next((sep for sep in _SEPARATORS if len(_row(path, text, sep)) > 1), None)
    if found is None:
        raise TraceError(
            f"{path}: one column in its first line: expected several, with a separator "
            "(--separator) between them"
        )
    first = _row(path, text, found)
    has_header = not any(_DATUM.fullmatch(str(cell).strip()) for cell in first.dropna())
    last = text[text.rfind("\n") + 1 :]
    n_cut = int(bool(last.strip()) and len(_row(path, last, found)) < len(first))
    try:
        frame = pd.read_csv(
            io.StringIO(text[: len(text) - len(last)] if n_cut else text),
            sep=found,
            header=0 if has_header else None,
            dtype="str",
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except (ValueError, pd.errors.ParserError) as problem:
        raise TraceError(
            f"{path}: not a table ({first_line(problem)}): expected equally many cells"
        ) from None
    if not isinstance(frame.index, pd.RangeIndex):
        raise TraceError(f"{path}: line 2 has more cells than the header: expected equally many")
    frame.columns = (
        frame.columns.str.strip()
        if has_header
        else pd.Index([str(k + 1) for k in range(frame.shape[1])])
    )
    frame.index = pd.RangeIndex(1 + has_header, 1 + has_header + len(frame), name="line")
    told = {
        "file": f"text in {encoding}",
        "separator": f"{_SEPARATORS.get(found, found)}, {'given' if separator else 'guessed'}",
        "header": "the first line" if has_header else "none: columns are called 1, 2, ...",
    }
    if last.strip() and not n_cut:
        # It may be whole, or cut inside its last cell: nothing in the file says which.
        told["last line"] = "has no end, read as it is: 25 may be the beginning of 2500"
    return Table(frame=frame.dropna(how="all"), told=told, n_cut=n_cut)


def _row(path: Path, text: str, separator: str) -> "pd.Series[str]":
    """Return the cells of the first line of a text."""
    line = text.lstrip("\r\n").partition("\n")[0]
    try:
        row = pd.read_csv(
            io.StringIO(line), sep=separator, header=None, dtype="str", skipinitialspace=True
        )
    except (ValueError, pd.errors.ParserError):
        raise TraceError(f"{path}: its first line is no row of a table") from None
    cells: pd.Series[str] = row.iloc[0]
    return cells
