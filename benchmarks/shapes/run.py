"""Which shapes of Flower apps run here: each on Flower's own engine and on ours, side by side.

An app is run twice on Flower's engine with four nodes, then on `ideal:4`, on phones, and with a
strategy of fedstale in the place of its FedAvg, each in a process of its own. What a cell says is
what was found: how near two models are, how many rounds there were, or why it failed.

    python benchmarks/shapes/run.py [--only APP]
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array
from flwr.common import parameters_to_ndarrays
from flwr.serverapp.strategy import Result

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "tests" / "fixtures")]

from flower_engine import final_parts  # noqa: E402 - after the paths above, as what follows
from written_apps import write_app  # noqa: E402

import fedstale  # noqa: E402
from lab.results import read_result, write_result  # noqa: E402
from shapes.apps import SHAPES, Shape, with_fedstale  # noqa: E402

NAME, COLUMNS = "shapes", ("flower", "ideal", "phones", "ours")
TRACES = {"ideal": "ideal:4", "phones": "synthetic:50", "ours": "synthetic:50"}
LIMIT_S = 200.0
EACH, WITHIN = " each time", (1e-7, 1e-6, 1e-5, 1e-3)
ENVIRONMENT = {
    **{"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "JAX_PLATFORMS": "cpu"},
    **{"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
}
Model = list[npt.NDArray[Any]]


def run(shape: Shape, column: str, folder: Path) -> tuple[dict[str, Any], Model]:
    """Run an app once in this process, and return how it ended and its model.

    Args:
        shape: the app.
        column: where it runs.
        folder: of the files of the run, and the working directory, where some apps write a model.
    """
    app, name = write_app(folder / "app", shape.app, **shape.constants), ""
    if column == "ours":
        for path in app.rglob("*.py"):
            source, name_here = with_fedstale(path.read_text(encoding="utf-8"))
            path.write_text(source, encoding="utf-8")
            name = name or name_here
        if not name:
            return {"status": "no FedAvg"}, []
    if column == "flower":
        found, model = _on_flower(app)
    else:
        traces, until = TRACES[column], None if column == "ideal" else "7d"
        done = fedstale.simulate(app, traces=traces, until=until, out=folder / "run")
        found = {"status": done.status, "reason": done.reason, "rounds": done.summary["rounds"]}
        found["errors"] = sum(error["jobs"] for error in done.summary["client_errors"])
        model = _by_name(done.model)
    saved = folder / "final_model.npz"
    return found | {"strategy": name}, _arrays(saved) if saved.is_file() else model


def _on_flower(app: Path) -> tuple[dict[str, Any], Model]:
    sys.path.insert(0, str(app))
    about = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, _ = about["tool"]["flwr"]["app"]["components"]["serverapp"].partition(":")
    try:
        parts = final_parts(app / f"{module.replace('.', '/')}.py", 4)
    except Exception as problem:  # whatever ends an app
        return {"status": "failed", "reason": f"{type(problem).__name__}: {problem}"}, []
    finally:
        sys.path.remove(str(app))
    if isinstance(parts, Result):
        return {"status": "finished"}, _by_name(parts.arrays)
    older = [] if parts is None else parameters_to_ndarrays(parts)
    return {"status": "finished"}, _by_name(dict(enumerate(older)))


def _by_name(arrays: Mapping[Any, Any]) -> Model:
    """Return arrays in the order of their names, as a run keeps them."""
    ordered = [arrays[name] for name in sorted(arrays, key=str)]
    return [one.numpy() if isinstance(one, Array) else one for one in ordered]


def alone(shape: Shape, column: str, folder: Path) -> tuple[dict[str, Any], Model]:
    """Return what `run` returns, run in a process of its own."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE), "--run", shape.key, column]
    about = {"cwd": folder, "env": os.environ | ENVIRONMENT, "text": True, "timeout": LIMIT_S}
    try:
        done = subprocess.run(command, capture_output=True, check=False, **about)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not over after {LIMIT_S:g} s"}, []
    if not (folder / "found.json").is_file():
        words = done.stderr.strip() or f"exit code {done.returncode}"
        return {"status": "failed", "reason": words.splitlines()[-1]}, []
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found, _arrays(folder / "model.npz")


def _arrays(path: Path) -> Model:
    with np.load(path) as file:
        return [file[key] for key in file.files]


def nearness(some: Model, others: Model) -> str:
    """Return how near two models are, in words; empty if they are not."""
    if len(some) != len(others):
        return ""
    pairs = list(zip(some, others, strict=True))
    if all(a.tobytes() == b.tobytes() for a, b in pairs):
        return "same model"
    if any(a.shape != b.shape for a, b in pairs):
        return ""
    if all(a.dtype == np.uint8 for a, _ in pairs):
        is_same = all(sorted(a.tobytes()) == sorted(b.tobytes()) for a, b in pairs)
        return "same bytes in another order" if is_same else ""
    far = max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in pairs)
    return next((f"within {limit:g}" for limit in WITHIN if far <= limit), "")


def ended(found: Mapping[str, Any]) -> str:
    """Return in words how a run ended, without its model."""
    if found["status"] == "no FedAvg":
        return ""
    name = f"{found['strategy']}, " if found.get("strategy") else ""
    if found["status"] != "finished":
        reason = found["reason"].strip().splitlines()[-1]
        return f"{name}{found['status']}: {reason}".replace("|", "/")
    rounds = found["rounds"]
    errors = f", {found['errors']} client errors" if found["errors"] else ""
    return f"{name}ran: {rounds} round{'s' * (rounds != 1)}{errors}"


def flower_cell(runs: Sequence[tuple[dict[str, Any], Model]]) -> str:
    """Return in words what two runs on Flower's engine say."""
    for found, _ in runs:
        if found["status"] != "finished":
            return ended(found)
    (_, first), (_, second) = runs
    if not first:
        return "ran, no model"
    return (nearness(first, second) or "another model") + EACH


def ideal_cell(ours: tuple[dict[str, Any], Model], theirs: Sequence[Model]) -> str:
    """Return in words how our run on ideal devices ended, and how near its model is to Flower's."""
    found, model = ours
    if found["status"] != "finished" or not model or not all(theirs):
        return ended(found)
    words = [nearness(model, other) for other in theirs]
    return ended(found) if "" in words else max(words, key=lambda one: _rank(one) or 0)


def is_as_recorded(column: str, found: Mapping[str, str], recorded: Mapping[str, str]) -> bool:
    """Return whether a cell says what it said, or that models are nearer than they were.

    How near they are is chance where Flower's engine sums replies in another order each time: then
    they may be as far as its own are from one another, and a step farther.
    """
    now, then = (_rank(row[column].removesuffix(EACH)) for row in (found, recorded))
    if found[column] == recorded[column] or now is None or then is None:
        return found[column] == recorded[column]
    spread = max(_rank(row["flower"].removesuffix(EACH)) or 0 for row in (found, recorded))
    return now <= max(then, spread) + (spread > 0)


def _rank(words: str) -> int | None:
    """Return how far models are that a cell tells of, counted from 0; None if it tells of none."""
    nearest = ["same model", *(f"within {limit:g}" for limit in WITHIN)]
    if words in nearest:
        return nearest.index(words)
    return len(nearest) if words == "another model" or words.startswith("ran: ") else None


def row(shape: Shape, folder: Path, columns: Sequence[str] = COLUMNS) -> dict[str, str]:
    """Return a row of the table."""
    made = {"shape": shape.says, "app": shape.key}
    if shape.needs:
        if find_spec(shape.needs) is None:
            return made | dict.fromkeys(columns, f"not run: {shape.needs} is not installed")
        made["with"] = f"{shape.needs} {version(_distribution(shape.needs))}"
    on_flower = [alone(shape, "flower", folder / f"flower{i}") for i in range(2)]
    made["flower"] = flower_cell(on_flower)
    ideal = alone(shape, "ideal", folder / "ideal")
    made["ideal"] = ideal_cell(ideal, [model for _, model in on_flower])
    for column in ("phones", "ours"):
        found, _ = alone(shape, column, folder / column)
        made[column] = ended(found)
    return made


def _distribution(package: str) -> str:
    return packages_distributions()[package][0]


def main() -> None:
    """Measure all rows, or those of some apps, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="apps; the other rows stay as they are")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="two apps")
    options = parser.parse_args()
    if options.run:
        (shape,) = (one for one in SHAPES if one.key == options.run[0])
        found, model = run(shape, options.run[1], Path.cwd())
        np.savez("model.npz", *model)
        Path("found.json").write_text(json.dumps(found), encoding="utf-8")
        return
    kept = {one["app"]: one for one in read_result(NAME)["rows"]} if options.only else {}
    rows = []
    for shape in SHAPES[: 2 if options.quick else None]:
        if options.only and shape.app not in options.only:
            rows.append(kept[shape.key])
            continue
        with TemporaryDirectory() as folder:
            rows.append(row(shape, Path(folder)))
        print(rows[-1], flush=True)
    write_result(NAME, rows, command="python benchmarks/shapes/run.py", quick=options.quick)


if __name__ == "__main__":
    main()
