"""Plans whose variants are strategies and parts that a run config names."""

import json

import tomli_w
from typer.testing import CliRunner

from fedstale.cli.main import app as command
from fedstale.traces import TraceSet


def plan_of(folder, variants, app="digits"):
    """Write a plan and its traces, and return the words that run it."""
    TraceSet.ideal(12).write(folder / "ideal.parquet")
    plan = {
        "app": str(app),
        "traces": str(folder / "ideal.parquet"),
        "seeds": [1],
        "run-config": {"num-server-rounds": 1, "buffer-size": 4, "local-epochs": 1},
        "variants": {name: {"run-config": parts} for name, parts in variants.items()},
    }
    (folder / "plan.toml").write_text(tomli_w.dumps(plan))
    return "compare", folder / "plan.toml", "--out", folder / "compared", "--workers", 1


def test_plans_of_a_comparison_name_parts_and_settings(tmp_path):
    privacy = {"clip-norm": 0.5, "noise-multiplier": 4.0, "delta": 1e-6, "noise-seed": 1}
    variants = {
        "REFL": {"strategy": "refl", "max-staleness": 3},
        "Oort and a median": {"strategy": "fedbuff", "selector": "oort", "robust": "median"},
        "private": {"strategy": "fedbuff", "privacy": privacy},
        "small": {"strategy": "fedbuff", "messages": "int4", "messages-down": "int8"},
        "half": {"strategy": "fedbuff", "work": 0.5, "normalise": "steps"},
        "fits": {"strategy": "fedbuff", "work": "10m", "forecasts": True},
    }
    run = CliRunner().invoke(command, [str(word) for word in plan_of(tmp_path, variants)])
    assert run.exit_code == 0, run.output
    runs = tmp_path / "compared" / "runs"
    assert "train epsilon" in json.loads((runs / "private/1/summary.json").read_text())["metrics"]
    assert "max-staleness = 3" in (runs / "REFL/1/config.toml").read_text().replace('"', "")
