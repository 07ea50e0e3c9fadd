"""`fedstale advise --apply` on runs of apps in folders, each with a fault of its own."""

import json

import pytest
from typer.testing import CliRunner

from fedstale.app_folder import BUILT_IN
from fedstale.cli.main import app
from fedstale.reports import Run

STARTER, DIGITS = BUILT_IN / "template" / "starter-app", BUILT_IN / "digits"
LONG, EPOCHS = "round-timeout=36000", "local-epochs=100 learning-rate=0.001"
STALE, EVALUATED = "validation=Validation(max_staleness=1)", "fraction_evaluate=1.0"
WORK = "work-per-example"
FAULTS = {
    "a timeout that is too short": (
        (DIGITS, "synthetic:60", "FedAvg(10)", "round-timeout=300", ""),
        "round-timeout",
    ),
    "more jobs than a round uses": (
        (STARTER, "synthetic:300", "FedAvg(schedule=over_selection(20, 8))", LONG, ""),
        "k_sync(",
    ),
    "a staleness that rejects most": (
        (STARTER, "synthetic:300", f"FedBuff(20, 4, {STALE})", LONG, ""),
        "max_staleness",
    ),
    "a model larger than the links": (
        (DIGITS, "synthetic:300", "FedBuff(20, 5)", LONG, "model-bytes=200000000"),
        "Compression",
    ),
    "evaluation on every device": (
        (STARTER, "synthetic:300", f"FedBuff(20, 5, {EVALUATED})", LONG, f"evaluate-{WORK}=3"),
        "fraction_evaluate",
    ),
    "jobs longer than devices stay": (
        (STARTER, "synthetic:300", "FedBuff(40, 5)", f"{LONG} {EPOCHS}", f"{WORK}=0.65"),
        "local-epochs",
    ),
}


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def simulated(folder, told):
    app_folder, traces, strategy, config, costs = told
    words = ["--traces", traces, "--seed", 2, "--out", folder]
    words += ["-c", f"num-server-rounds=60 strategy='{strategy}' {config}"]
    run("simulate", app_folder, *words, *(["--set", f"costs.{costs}"] if costs else []))
    return Run(folder)


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_change_of_a_run_brings_what_it_promises(name, tmp_path):
    told, setting = FAULTS[name]
    before = simulated(tmp_path / "run", told)
    first = before.advice[0]
    assert first.do in run("advise", before.folder)
    found = json.loads(run("advise", before.folder, "--apply", "--json"))
    (taken,) = found["taken"]
    assert setting in str(taken["change"])
    assert taken["do"] == first.do
    assert taken["achieved"] == pytest.approx(taken["promised"], rel=0.25)
    after = Run(found["out"])
    assert (after.folder.parent, after.folder.name) == (tmp_path, "run-advised")
    page = (after.folder / "report.html").read_text(encoding="utf-8")
    assert f"{taken['promised']:.0%} promised, {taken['achieved']:.0%} saved" in page
