"""`fedstale advise --apply` on runs of apps in folders, each with a fault of its own."""

import json

import pytest
from folder_app import folder_app
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


OWN = None
"""An app that knows nothing of fedstale, written for each run."""
FRESH = {
    # name: what the run is told, the cause, and what is set by it, if this app can be told so
    "rounds of an own app that wait": (
        (OWN, "synthetic:200", "", "share=0.3", ""),
        ("waiting", "FedBuff("),
    ),
    "a timeout of an own app, on sites": (
        (OWN, "synthetic:20@sites", "", "share=1.0 round-timeout=20.0", ""),
        ("too late", "round-timeout"),
    ),
    "a timeout of an own app, on desktops": (
        (OWN, "synthetic:80@desktops", "", "share=0.5 round-timeout=35.0", ""),
        ("too late", "round-timeout"),
    ),
    "long jobs of an own app": (
        (OWN, "synthetic:400", "", "share=0.3 local-epochs=60", ""),
        ("went offline", "local-epochs"),
    ),
    "clients of an own app that fail": (
        (OWN, "synthetic:200", "", "share=0.3 fails=4", ""),
        ("client error", ""),
    ),
    "a buffer above concurrency": (
        (STARTER, "synthetic:20@sites", "FedBuff(4, 16)", LONG, ""),
        ("buffer above concurrency", "buffer_size"),
    ),
    "few jobs in flight": (
        (STARTER, "synthetic:150@desktops", "FedBuff(3, 3)", LONG, ""),
        ("few in flight", "concurrency"),
    ),
    "over-selection by half": (
        (STARTER, "synthetic:400", "FedAvg(schedule=over_selection(12, 2.5))", LONG, ""),
        ("over-selected", "k_sync("),
    ),
    "costly evaluation on desktops": (
        (
            *(STARTER, "synthetic:150@desktops", "FedBuff(10, 5, fraction_evaluate=0.8)", LONG),
            f"evaluate-{WORK}=4",
        ),
        ("evaluation", "fraction_evaluate"),
    ),
    "a limit of two versions": (
        (STARTER, "synthetic:400", f"FedBuff(30, 3, {STALE.replace('1', '2')})", LONG, ""),
        ("too stale", "max_staleness"),
    ),
    "a large model of an app without the mod": (
        (OWN, "synthetic:150@desktops", "", "share=0.3", "model-bytes=2000000000"),
        ("uploads or downloads", ""),
    ),
    "a large model of an app with it": (
        (DIGITS, "synthetic:200", "FedAvg(8)", LONG, "model-bytes=100000000"),
        ("uploads", "Compression"),
    ),
}


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def simulated(folder, told, seed=2):
    app_folder, traces, strategy, config, costs = told
    of_app = f"num-server-rounds=60 strategy='{strategy}'" if strategy else ""
    words = ["--traces", traces, "--seed", seed, "--out", folder, "-c", f"{of_app} {config}"]
    words += ["--set", f"costs.{costs}"] if costs else []
    run("simulate", app_folder or folder_app(folder.with_name("app")), *words)
    return Run(folder)


@pytest.mark.parametrize("name", FRESH)
def test_the_first_advice_is_the_fault_and_holds_or_is_not_promised(name, tmp_path):
    told, (cause, setting) = FRESH[name]
    before = simulated(tmp_path / "run", told, seed=11)
    first = before.advice[0]
    assert first.cause in cause.split(" or ")
    taken = json.loads(run("advise", before.folder, "--apply", "--json"))["taken"]
    if not setting:
        assert not first.change
        is_none = not any(a.change and a.saves >= 0.05 for a in before.advice)
        said = "No change that saves 5% is an option of the run."
        assert (said in run("advise", before.folder, "--apply")) == is_none
        assert first.do not in [each["do"] for each in taken]
        return
    assert setting in str(first.change)
    assert taken[0]["do"] == first.do
    assert taken[0]["achieved"] == pytest.approx(taken[0]["promised"], rel=0.25)


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


def test_changes_go_on_until_none_is_left(tmp_path):
    told = (DIGITS, "synthetic:60", "FedAvg(10)", "round-timeout=300", "")
    before = simulated(tmp_path / "run", told)
    found = json.loads(run("advise", before.folder, "--all", "--json"))
    assert len(found["taken"]) > 1
    assert all(not each["change"] or each["saves"] < 0.05 for each in found["advice"])
    last = Run(found["out"])
    assert last.costs["device_time_wasted"] < 0.1 < before.costs["device_time_wasted"]
    assert last.end_s < before.end_s
