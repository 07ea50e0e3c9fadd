"""Each example runs as it stands and prints what is recorded beside it.

A script `name.py` prints `name.out`; the notebook holds the outputs of its cells. A change of them
must be meant. They are recorded by

    python tests/system/project/test_examples.py    # all; or the names of some, such as first_run

Weights & Biases and MLflow are not installed for everyday tests: a stand-in records what their
callbacks send, which must be what the run measured. `make test-libraries` installs the newest of
both, and what they keep is read back.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SCRIPTS = {path.stem: path for path in EXAMPLES.glob("*.py")}
NOTEBOOKS = {path.stem: path for path in EXAMPLES.glob("*.ipynb")}
CALLBACKS = {"mlflow_callback": "mlflow", "wandb_callback": "wandb"}
NEEDS = {"flwr_datasets_partition": "flwr_datasets", "tensorboard_callback": "tensorboard"}
"""Examples that need more than the server's extra, and which module."""
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
PLAIN = sorted(set(SCRIPTS) - set(CALLBACKS))


def run(*words, folder):
    """Return what a command of this Python prints."""
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def recorded(name):
    return SCRIPTS[name].with_suffix(".out").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLAIN)
def test_an_example_prints_what_is_recorded(name, tmp_path):
    if importlib.util.find_spec(NEEDS.get(name, "fedstale")) is None:
        pytest.skip(f"{name}.py needs {NEEDS[name]}: make setup installs it")
    assert run(SCRIPTS[name], folder=tmp_path) == recorded(name)


class StandIn(ModuleType):
    """Takes any call of a module and records it."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "summary":
            return self
        return lambda *args, **options: self.calls.append((name, args, options))

    def named(self, *names):
        return [call for call in self.calls if call[0] in names]


def watched(name):
    """Run an example with a stand-in; return that, the run, and what it printed."""
    stand_in, before = StandIn(CALLBACKS[name]), sys.modules.get(CALLBACKS[name])
    sys.modules[CALLBACKS[name]] = stand_in
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            names = runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    finally:
        del sys.modules[CALLBACKS[name]]
        if before is not None:
            sys.modules[CALLBACKS[name]] = before
    return stand_in, names["run"], said.getvalue()


def rows(run):
    """Return what a run measured, a row a value: its name, hours, version and value."""
    table = run.metrics
    names = table["source"] + "/" + table["name"]
    return sorted(zip(names, table["time_s"] / 3600, table["version"], table["value"], strict=True))


def sent(values, version):
    """Return the rows of one call."""
    return [
        (name, values["hours"], version, value) for name, value in values.items() if "/" in name
    ]


def test_the_callback_of_weights_and_biases_sends_what_was_measured():
    wandb, run, said = watched("wandb_callback")
    assert said == recorded("wandb_callback")
    calls = [values for _, (values,), _ in wandb.named("log")]
    assert sorted(row for v in calls for row in sent(v, v["version"])) == rows(run)
    assert len(calls) > 5
    assert [call[0] for call in wandb.calls if call[0] != "log"] == [
        *("init", "define_metric", "update", "finish")
    ]
    assert wandb.calls[-2:] == [
        ("update", ({"status": run.status, "reason": run.reason},), {}),
        ("finish", (), {"exit_code": 0}),
    ]


def test_the_callback_of_mlflow_sends_what_was_measured():
    mlflow, run, said = watched("mlflow_callback")
    assert said == recorded("mlflow_callback")
    calls = [(values, options["step"]) for _, (values,), options in mlflow.named("log_metrics")]
    assert sorted(row for call in calls for row in sent(*call)) == rows(run)
    assert len(calls) > 5
    assert [call[0] for call in mlflow.calls if call[0] != "log_metrics"] == [
        *("set_experiment", "start_run", "log_params", "set_tags", "end_run")
    ]
    assert mlflow.calls[-2:] == [
        ("set_tags", ({"status": run.status, "reason": run.reason},), {}),
        ("end_run", ("FINISHED",), {}),
    ]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Go to an empty folder, whence nothing is sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # what a release warns of is its own
def test_mlflow_itself_keeps_what_was_measured(alone):
    mlflow = pytest.importorskip("mlflow")
    run = runpy.run_path(str(SCRIPTS["mlflow_callback"]), run_name="__main__")["run"]
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([mlflow.get_experiment_by_name("fedstale").experiment_id])
    measured = rows(run)
    found = [
        (name, point.step, point.value)
        for name in {row[0] for row in measured}
        for point in client.get_metric_history(kept.info.run_id, name)
    ]
    assert sorted(found) == sorted((name, version, x) for name, _, version, x in measured)
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["reason"] == run.reason
    assert kept.data.params["traces"] == "synthetic:60"


@pytest.mark.filterwarnings("ignore")  # what a release warns of is its own
def test_weights_and_biases_itself_keeps_what_was_measured(alone):
    pytest.importorskip("wandb")
    run = runpy.run_path(str(SCRIPTS["wandb_callback"]), run_name="__main__")["run"]
    (kept,) = alone.glob("wandb/offline-run-*/*.wandb")
    kept = logged(kept.read_bytes())
    for name, hours, _, value in rows(run):
        assert name.encode() in kept
        assert json.dumps(hours).encode() in kept
        assert json.dumps(value).encode() in kept
    assert run.reason.encode() in kept


def logged(data, block=32_768, header=7):
    """Return what a log holds without the headers of its pieces, as LevelDB has them."""
    parts, at = [], header
    while at < len(data):
        left = block - at % block
        if left < header:
            at += left
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        parts.append(data[at + header : at + header + size])
        at += header + size
    return b"".join(parts)


def shown(path, folder):
    """Return the outputs of the code cells of a notebook, run in order in one namespace."""
    return json.loads(run(Path(__file__).resolve(), "--cells", path, folder=folder))


def outputs(cells):
    """Run code cells as a notebook does; return what each of them shows."""
    names, found = {"__name__": "__main__"}, []
    for number, source in enumerate(cells, 1):
        said, value = io.StringIO(), None
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(said):
            exec(compile(tree, f"cell {number}", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        own = []
        if said.getvalue():
            text = said.getvalue().splitlines(keepends=True)
            own.append({"name": "stdout", "output_type": "stream", "text": text})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            if hasattr(value, "_repr_html_"):
                data["text/html"] = value._repr_html_().splitlines(keepends=True)
            result = {"data": data, "execution_count": number, "metadata": {}}
            own.append({**result, "output_type": "execute_result"})
        # A figure of plotly is megabytes of JavaScript: a notebook draws it, and records none.
        found.append([] if type(value).__name__ == "Figure" else own)
    return found


def code_cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


MEASURED = re.compile(r"\b(accuracy|loss)((?:</td>\s*<td>)|\s)[\d.]+%?")
"""What the CPU has a say in: the last digits of an accuracy and a loss in the figures of a run."""


def comparable(outputs):
    return [
        {kind: MEASURED.sub(r"\1", "".join(lines)) for kind, lines in texts.items()}
        for texts in (output.get("data", {"text/plain": output.get("text")}) for output in outputs)
    ]


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_notebook_shows_what_is_recorded_in_it(name, tmp_path):
    cells = code_cells(NOTEBOOKS[name])
    for cell, found in zip(cells, shown(NOTEBOOKS[name], tmp_path), strict=True):
        assert comparable(found) == comparable(cell["outputs"]), "".join(cell["source"])


def record(name, folder):
    """Rewrite what is recorded of an example."""
    if name in NOTEBOOKS:
        path = NOTEBOOKS[name]
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, found) in enumerate(zip(cells, shown(path, folder), strict=True), 1):
            cell["outputs"], cell["execution_count"] = found, number
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    if name in SCRIPTS:
        said = watched(name)[2] if name in CALLBACKS else run(SCRIPTS[name], folder=folder)
        SCRIPTS[name].with_suffix(".out").write_text(said, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cells"]:
        cells = code_cells(Path(sys.argv[2]))
        print(json.dumps(outputs(["".join(cell["source"]) for cell in cells])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name in sys.argv[1:] or sorted({*SCRIPTS, *NOTEBOOKS}):
                record(name, folder)
