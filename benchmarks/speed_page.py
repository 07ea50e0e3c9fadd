"""Write the tables of docs/speed.md from benchmarks/results/peers.json and batched_gpu.json.

What stands between the markers is replaced; the words around them are kept.

Run it with: python benchmarks/speed_page.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import refilled, rewrite, table
from results_file import read_result

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
Row = dict[str, Any]
NAMES = {
    "pfl": "pfl 0.6",
    "fedjax": "fedjax 0.0.17",
    "naive torch loop": "a naive loop in torch",
    "batched": "`batched`, with its messages",
    "batched, the program alone": "`batched`, the program alone",
}
WAYS = ("with messages, 16 cores", "with messages, GPU", "alone, 16 cores", "alone, GPU")


def peers(rows: Sequence[Row]) -> str:
    """Return how many clients a second others train, and how much faster `batched` is."""
    by = {row["what"].removeprefix("clients per processor second, "): row for row in rows}
    alone = by["batched, the program alone"]["median"]
    lines = []
    for what, name in NAMES.items():
        row = by[what]
        ratios = row["batched is"], alone / row["median"]
        cells = ["", ""] if what.startswith("batched") else [f"{x:.1f} times" for x in ratios]
        lines.append([name, f"{row['median']:,.0f}", *cells])
    job = "256 clients of 64-32-10 units, 20 examples, two epochs"
    return table([job, "clients a second", "`batched` is", "its program is"], lines)


def gpu(rows: Sequence[Row]) -> str:
    """Return how much faster than one thread cores and a GPU are, by model and clients."""
    ratios: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        what = row["what"].removeprefix("clients per second, batched ")
        ratios.setdefault((row["model"], row["together"]), {})[what] = row["ratio to one thread"]
    lines = [
        [model, f"{n:,}", *(_ratio(found[way]) for way in WAYS)]
        for (model, n), found in ratios.items()
    ]
    heads = ["16 cores", "GPU", "16 cores, the program alone", "GPU, alone"]
    return table(["model", "together", *heads], lines)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def written() -> dict[Path, str]:
    """Return the page as the results say it."""
    peers_rows, gpu_rows = (read_result(name)["rows"] for name in ("peers", "batched_gpu"))
    return refilled([PAGE], {"peers": peers(peers_rows), "gpu": gpu(gpu_rows)})


if __name__ == "__main__":
    rewrite(written())
