"""Write the tables of what smaller messages are worth, and of what does not pay, into their pages.

They come from results/compact.json, compact_codec.json and attacks_int4.json, and from what the
recipes in examples/ print. What stands between the markers is replaced; the words around them are
kept.

Run it with: python benchmarks/compact_page.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import refilled, rewrite
from results_file import read_result

HERE = Path(__file__).parent
DOCS, EXAMPLES = HERE.parent / "docs", HERE.parent / "examples"
PAGES = DOCS / "results" / "messages.md", DOCS / "what-does-not-pay.md"
RECIPES = "overlapping_upload", "fedglomo_momenta"
FORM = "int4"
SAME = "hours_ratio_to_same_bytes"
RECOMMENDED, COUNTED = "int4, int8 down", ("hours", "device_hours", "up_gb", "down_gb")
Row = dict[str, Any]


def arms(rows: Sequence[Row]) -> str:
    """Return the table of one place."""
    first = rows[0]
    lines = [
        f"Target {first['target']:.2f}; the best pair on other phones is *{first['best_pair']}*; "
        f"{min(first['devices'])} to {max(first['devices'])} phones in a window.",
        "",
        "| replies | rate | h to target | x in full | x the best pair | device-hours | GB up "
        "| GB down | accuracy in the end |",
        "|---|---:|---:|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            f"{row['arm']}{_missed(row)}",
            f"{row['server_rate']:g}",
            f"{row['hours']:.2f}",
            _ratio(row["hours_ratio"]),
            _ratio(row["hours_ratio_to_best_pair"]),
            f"{row['device_hours']:.1f}",
            f"{row['up_gb']:.2f}",
            f"{row['down_gb']:.2f}",
            f"{row['final_accuracy']:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _missed(row: Row) -> str:
    n = len(row["seeds"])
    missed = n - round(n * row["reached"])
    return f" ({missed} of {n} never)" if missed else ""


def _ratio(values: Sequence[float]) -> str:
    mean, low, high = values
    return "1" if low == high == 1.0 else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def summary(rows: Sequence[Row]) -> str:
    """Return what the pair that the docs recommend is worth in each place."""
    lines = [
        "| place | x as fast | x fewer device-hours | x fewer GB up | x fewer GB down |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["arm"] == RECOMMENDED:
            cells = [_ratio(row[f"{name}_ratio"]) for name in COUNTED]
            lines.append(f"| {row['place']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def unpaid(rows: Sequence[Row]) -> str:
    """Return what refinements are worth beside the best uniform pair of formats."""
    lines = [
        "| place | replies | x the best pair | x the format of its bytes | GB up | of the pair |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in rows:
        if row["arm"].startswith(("top-k", "by forecast")):
            (best,) = (
                one
                for one in rows
                if (one["place"], one["arm"]) == (row["place"], row["best_pair"])
            )
            lines.append(
                f"| {row['place']} | {row['arm']} | {_ratio(row['hours_ratio_to_best_pair'])} "
                f"| {_ratio(row[SAME]) if SAME in row else ''} "
                f"| {row['up_gb']:.2f} | {best['up_gb']:.2f} |"
            )
    return "\n".join(lines)


def printed(recipe: str) -> str:
    """Return what a recipe prints, as its recorded output has it."""
    text = (EXAMPLES / f"{recipe}.out").read_text(encoding="utf-8")
    return f"```text\n{text}```"


def speed(rows: Sequence[Row]) -> str:
    """Return how fast formats are written and read, by NumPy alone in brackets, and the memory."""
    timed = [row for row in rows if row["what"] == "speed"]
    speeds = {(row["format"], row["work"], row["loop"]): row["gb_per_s"] for row in timed}
    works = list(dict.fromkeys(row["work"] for row in timed if row["format"] != "float16"))
    lines = [
        "| format | " + " | ".join(works) + " | memory to encode, to decode, KB |",
        "|---|" + "---:|" * (len(works) + 1),
    ]
    for row in rows:
        if row["what"] == "memory":
            form = row["format"]
            cells = [
                _both(speeds.get((form, work, "numba")), speeds.get((form, work, "NumPy")))
                for work in works
            ]
            memory = f"{row['encode_bytes'] / 1e3:.0f}, {row['decode_bytes'] / 1e3:.0f}"
            lines.append("| " + " | ".join([form, *cells, memory]) + " |")
    return "\n".join(lines)


def _both(compiled: float | None, alone: float | None) -> str:
    if alone is None:
        return ""
    return f"{alone:.2f}" if compiled is None else f"{compiled:.2f} ({alone:.2f})"


def sizes(rows: Sequence[Row]) -> str:
    """Return bytes as they are charged and as they are serialised."""
    lines = [
        "| network | format | charged | packed | off | array by array | off |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['network']} | {row['format']} | {row['charged']:,} | {row['packed']:,} "
        f"| {row['packed_off']:+.1%} | {row['apart']:,} | {row['apart_off']:+.1%} |"
        for row in rows
        if row["what"] == "bytes"
    ]
    return "\n".join(lines)


def attacked(full: Sequence[Row], small: Sequence[Row]) -> str:
    """Return the accuracy of each rule under each attack, in a format less in full, of one seed."""
    before = {_cell(row): row["accuracy_by_seed"][0] for row in full}
    off = {_cell(row): row["accuracy_by_seed"][0] - before[_cell(row)] for row in small}
    attacks = list(dict.fromkeys(row["attack"] for row in small))
    lines = ["| rule | " + " | ".join(attacks) + " |", "|---|" + "---:|" * len(attacks)]
    for rule in dict.fromkeys(row["rule"] for row in small):
        cells = [off.get(("late", attack, rule)) for attack in attacks]
        words = ["" if cell is None else f"{cell:+.3f}" for cell in cells]
        lines.append(f"| {rule} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> tuple[str, str, str]:
    return row["setting"], row["attack"], row["rule"]


def tables() -> dict[str, str]:
    """Return the tables of both pages, by name."""
    rows = _rows("compact")
    places = dict.fromkeys(row["place"] for row in rows)
    codec = _rows("compact_codec")
    return {
        **{place: arms([row for row in rows if row["place"] == place]) for place in places},
        "summary": summary(rows),
        "refinements": unpaid(rows),
        **{recipe: printed(recipe) for recipe in RECIPES},
        "codec": speed(codec),
        "bytes": sizes(codec),
        "attacks": attacked(_rows("attacks"), _rows(f"attacks_{FORM}")),
    }


def _rows(name: str) -> list[Row]:
    rows: list[Row] = read_result(name)["rows"]
    return rows


def written() -> dict[Path, str]:
    """Return the pages as the results say them."""
    return refilled(PAGES, tables())


if __name__ == "__main__":
    rewrite(written())
