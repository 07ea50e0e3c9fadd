"""Write the pages that show results: each from a template beside its benchmark, and the results.

A template is Markdown with Jinja: `rows(NAME)` are the rows of results/NAME.json, and filters below
turn them into the words of a cell. `PAGES` are written whole. The README and other pages have a
place for what a template gives, between `<!-- FOLDER/NAME: begin -->` and
`<!-- FOLDER/NAME: end -->`; what stands there is replaced by benchmarks/FOLDER/NAME.md.

Run it with: python benchmarks/pages.py
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from fedstale.contrib.suite import table as suite_table
from forecasts import tables as forecasts
from lab.results import read_result
from suite.table import across

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
PAGES = {
    "benchmarks/README.md": "speed/README.md reproduce/page.md",
    "docs/contrib/origins.md": "papers/origins.md",
    "docs/results/agent.md": "agent/windows.md agent/worlds.md",
    "docs/results/agent-training.md": "agent/training.md",
    "docs/results/forecasting.md": "forecasts/page.md forecasts/times.md",
    "docs/results/how-many.md": "agent/how_many.md",
    "docs/results/messages.md": "messages/page.md work/page.md",
    "docs/results/peers.md": "peers/page.md peers/clothes.md",
    "docs/results/robustness.md": "robustness/page.md liars/page.md",
    "docs/results/strategies.md": "methods/page.md papers/page.md",
}
"""By page, the templates that it is written from, one after the other."""
PLACE = re.compile(r"(<!-- ([\w-]+/[\w-]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
NOTHING = "-"
BOUNDS = {"exact": "", "at least": "≥ ", "at most": "≤ ", "unknown": "? "}
Row = dict[str, Any]


def made_at(names: Iterable[str]) -> str:
    """Return a line on the commits at which some results were measured; nothing of none."""
    by_commit: dict[str, list[str]] = {}
    commits = {name: read_result(name).get("commit") for name in names}
    for name, commit in commits.items():
        at = f"`{commit[:10]}`" if commit else "a commit that was not noted"
        at += " with changes that no commit has" * (commit or "").endswith("-dirty")
        by_commit.setdefault(at, []).append(name)
    told = [f"{at} ({', '.join(sorted(some))})" for at, some in by_commit.items()]
    return f"\nMeasured at {'; '.join(told)}.{alive(commits)}\n" if told else ""


def alive(commits: Mapping[str, str | None]) -> str:
    """Return which results, by their commits, hold or have moved by quick forms (alive.py)."""
    holds: dict[str, list[str]] = {}
    moved = []
    for row in rows("alive"):
        if row["result"] not in commits or row["commit"] != commits[row["result"]]:
            continue
        if row["verdict"] in {"same", "close"}:
            by = " by today's script" * (row.get("scripts") == "today's")
            holds.setdefault(row["at"][:10], []).append(row["result"] + by)
        elif row["verdict"] == "moved":
            moved.append(f" {row['result']} has moved by `{row['at'][:10]}`: {row['what']}.")
    told = [f" Holds at `{at}` ({', '.join(some)})." for at, some in holds.items()]
    return "".join([*told, *moved])


def rows(name: str) -> list[Row]:
    """Return the rows of a result."""
    found: list[Row] = read_result(name)["rows"]
    return found


def where(some: Iterable[Row], **about: object) -> list[Row]:
    """Return the rows that have some values; a list or tuple of values is any of them."""
    return [
        row
        for row in some
        if all(
            row.get(key) in value if isinstance(value, list | tuple) else row.get(key) == value
            for key, value in about.items()
        )
    ]


def values(some: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in some if key in row))


def one(some: Sequence[Row], key: str) -> Any:
    """Return a value of the only row; None if there is no row, or no such value.

    Raises:
        ValueError: there are several rows.
    """
    if len(some) > 1:
        raise ValueError(f"{key}: expected one row, found {len(some)}")
    return some[0].get(key) if some else None


def mean(some: Iterable[Row], key: str) -> float:
    """Return the mean of a column; NaN of no rows."""
    found = [row[key] for row in some]
    return float(np.mean(found)) if found else float("nan")


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as a format says; nothing of None."""
    return "" if value is None else format(value, form)


def bracketed(triple: Sequence[float], form: str = ".2f") -> str:
    """Return a mean and its interval, as 1.20 [1.10, 1.30]; 1 where both ends are."""
    if triple[1] == triple[2]:
        return "1"
    low, middle, high = (format(x, form) for x in (triple[1], triple[0], triple[2]))
    return f"{middle} [{low}, {high}]"


def to(triple: Sequence[float], form: str = ".2f") -> str:
    """Return a mean and its interval, as 1.20 (1.10 to 1.30)."""
    middle, low, high = (format(x, form) for x in triple)
    return f"{middle} ({low} to {high})"


def between(triple: Sequence[float]) -> str:
    """Return the interval of a difference, as (-0.004 to +0.006)."""
    return f"({triple[1]:+.3f} to {triple[2]:+.3f})"


def part(row: Row, key: str) -> str:
    """Return a mean and its interval of three columns of a row."""
    ends = [row[f"{key} {end}"] for end in ("mean", "low", "high")]
    return bracketed(ends, ".3f")


def bounded(found: Row | None) -> str:
    """Return a ratio of censored runs with its interval, and whether it is a bound."""
    if found is None:
        return NOTHING
    return BOUNDS[found["bound"]] + bracketed([found[k] for k in ("mean", "low", "high")])


def table(head: Sequence[str], cells: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a table whose first columns are words."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *cells)]
    return "\n".join([lines[0], rule, *lines[1:]])


def of_peers(row: Row) -> str:
    """Return the accuracy in a row of peers, and of the worst site where each has a model."""
    worst = f" ({number(row['worst'], '.3f')})" if row["arm"].startswith("gossip") else ""
    return f"{number(row['accuracy'], '.3f')}{'' if row['is_close'] else '*'}{worst}"


def others() -> list[Row]:
    """Return what other projects do, a row each, as others/others.toml has it."""
    text = (HERE / "others" / "others.toml").read_text(encoding="utf-8")
    return [{"module": ""} | row for row in tomllib.loads(text)["other"]]


def measured(name: str) -> str:
    """Return a whole result as a table, with the command and the machine above it."""
    result, found = read_result(name), rows(name)
    columns = list(dict.fromkeys(key for row in found for key in row))
    machine, versions = result["hardware"], result["versions"].items()
    speed = machine.get("naive_clients_per_s")
    about = [
        f"`{result['command']}` on {machine['cores']} cores of {machine['cpu']}, "
        f"load {result['load_average'][0]:.1f} at the end, commit {result['commit'][:10]}, "
        + ", ".join(f"{name} {number}" for name, number in versions)
        + (f"; a naive torch loop trains {speed:.0f} clients a second there" if speed else ""),
        "",
    ]
    is_word = [isinstance(found[0].get(key), str) for key in columns]
    lines = [columns, *([_cell(row.get(key, "")) for key in columns] for row in found)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|" + "|".join("---" if each else "---:" for each in is_word) + "|"
    return "\n".join([*about, text[0], rule, *text[1:]])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def frame(columns: pd.DataFrame, best: str = "", form: str = ".3f") -> str:
    """Return a table of numbers by row and column; the best of a column is bold.

    Args:
        columns: numbers or texts.
        best: "min" or "max"; nothing is bold if empty.
        form: of a number.
    """
    cells = []
    for name, row in columns.iterrows():
        line = [str(name)]
        for column, value in row.items():
            text = value if isinstance(value, str) else format(value, form)
            is_best = best and value == getattr(columns[column], best)()
            line.append("" if text == "nan" else f"**{text}**" if is_best else text)
        cells.append(line)
    return table(["", *map(str, columns.columns)], cells)


def written() -> dict[Path, str]:
    """Return all pages as results and templates say."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "where": where,
        "values": values,
        "mean": mean,
        "one": one,
        "n": number,
        "day": lambda day: f"{day.day} {day:%B %Y}",
        **{
            each.__name__: each for each in (bracketed, to, between, part, bounded, frame, of_peers)
        },
        **{
            each.__name__: each
            for each in (
                *(forecasts.chances, forecasts.skills, forecasts.errors, forecasts.differences),
                *(forecasts.shown, forecasts.covered, forecasts.by_horizon, forecasts.own_outcomes),
            )
        },
    }
    environment.globals |= {
        "measured": measured,
        "others": others,
        "suite_table": suite_table,
        "across": across,
        "example": lambda name: (ROOT / "examples" / f"{name}.out").read_text(encoding="utf-8"),
    }

    read = cache(read_result)

    def rendered(names: str) -> str:
        seen: dict[str, Any] = {}

        def result(name: str) -> dict[str, Any]:
            seen[name] = read(name)
            return seen[name]

        templates = [environment.get_template(name) for name in names.split()]
        parts = [
            each.render(result=result, rows=lambda name: result(name)["rows"]) for each in templates
        ]
        return "\n".join(parts) + made_at(seen)

    made = {ROOT / page: rendered(names) for page, names in PAGES.items()}

    def filled(place: "re.Match[str]") -> str:
        return place[1] + rendered(f"{place[2]}.md") + place[3]

    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if page not in made and PLACE.search(text):
            made[page] = PLACE.sub(filled, text)
    return made


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
