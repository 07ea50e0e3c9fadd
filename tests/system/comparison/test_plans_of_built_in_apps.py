"""Plans whose variants are strategies and parts that a run config names."""

import json

import tomli_w
from named_parts import VARIANTS, table_of
from typer.testing import CliRunner

from fedstale.cli.main import app as command
from fedstale.traces import TraceSet


def test_plans_of_a_comparison_name_parts_and_settings(tmp_path):
    traces, plan = tmp_path / "ideal.parquet", tmp_path / "plan.toml"
    TraceSet.ideal(12).write(traces)
    plan.write_text(tomli_w.dumps(table_of(VARIANTS, str(traces))))
    words = ["compare", str(plan), "--out", str(tmp_path / "compared"), "--workers", "1"]
    run = CliRunner().invoke(command, words)
    assert run.exit_code == 0, run.output
    runs = tmp_path / "compared" / "runs"
    assert "train epsilon" in json.loads((runs / "private/1/summary.json").read_text())["metrics"]
    assert "max_staleness=3" in (runs / "REFL/1/config.toml").read_text()
