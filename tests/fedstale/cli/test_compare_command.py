import csv
import io
import json
import re

import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.runs import compare


@pytest.fixture
def run_command(tmp_path, monkeypatch):
    """Return a function that calls the command with arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(compare)
    return lambda *arguments: CliRunner().invoke(app, [str(text) for text in arguments])


@pytest.fixture
def write_finished():
    from compared_runs import write_finished

    return write_finished


@pytest.fixture
def runs(tmp_path, write_finished):
    """Return folders of two variants with two seeds each; one run of fedavg never gets to 0.8."""
    return [
        write_finished(
            tmp_path / f"{strategy}-{seed}",
            seed=seed,
            run_config={"strategy": strategy},
            accuracies=[(0.0, 0.1), (600.0 * seed, last), (3000.0, last)],
        )
        for strategy, lasts in (("fedavg", (0.8, 0.7)), ("<b>fedbuff</b>", (0.9, 0.9)))
        for seed, last in zip((1, 2), lasts, strict=True)
    ]


def test_finished_runs_are_compared(run_command, runs, tmp_path):
    result = run_command(*runs, "--target", "accuracy 0.8")
    assert result.exit_code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    row = {cells[0]: cells[1:] for cells in rows if cells[0].startswith("strategy=")}
    # Times of fedavg: 600 s, and never within the hour.
    assert row["strategy=fedavg"][:4] == ["2", "at least 35.00", "1 of 2", "reference"]
    # fedbuff takes 600 and 1200 s: as fast, and three times as fast at least.
    assert row["strategy=<b>fedbuff</b>"][2] == "2 of 2"
    assert row["strategy=<b>fedbuff</b>"][3].startswith("at least 1.73 (")
    assert row["strategy=<b>fedbuff</b>"][5].startswith("+0.150 (")
    assert {p.name for p in (tmp_path / "comparisons" / "runs").iterdir()} == {
        f"comparison.{ending}" for ending in ("html", "json", "csv", "md")
    }


def test_programs_get_json_and_csv_with_the_same_numbers(run_command, runs, tmp_path):
    result = run_command(*runs, "--target", "accuracy 0.8", "--json", "--out", tmp_path / "out")
    printed = json.loads(result.stdout)
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {k: v for k, v in printed.items() if k != "out"} == written
    fedbuff = written["variants"][1]
    assert fedbuff["speed_up"]["bound"] == "at least"
    assert fedbuff["speed_up"]["mean"] == pytest.approx(3.0**0.5)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "comparison.csv").read_text())))
    found = {(line["variant"], line["measure"]): line for line in lines}
    accuracy = found["strategy=<b>fedbuff</b>", "server accuracy"]
    assert float(accuracy["difference"]) == pytest.approx(0.15)
    assert float(accuracy["mean"]) == fedbuff["means"]["server accuracy"]["mean"]
    assert found["strategy=fedavg", "time_to_target_s"]["note"] == "at least"


def test_the_report_shows_means_and_differences_and_obeys_no_name(run_command, runs, tmp_path):
    from read_page import Seen, plots_of

    run_command(*runs, "--target", "accuracy 0.8", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    text = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    plots = plots_of(text)
    assert set(plots) == {"mean-0", "times", "speed-up", "difference-0"}
    (mean,) = (t for t in plots["mean-0"]["traces"] if t.get("name") == "strategy=fedavg")
    # The end of the hour: (0.8 + 0.7) / 2.
    assert mean["y"][-1] == pytest.approx(0.75)
    (difference,) = (t for t in plots["difference-0"]["traces"] if "error_x" in t)
    assert difference["x"] == [pytest.approx(0.15)]
    assert "b" not in Seen(text).tags
    assert "strategy=<b>fedbuff</b>" in Seen(text).text


def test_runs_that_measured_nothing_are_still_compared(run_command, write_finished, tmp_path):
    folders = [write_finished(tmp_path / a, after_end=a) for a in ("repeat", "stop")]
    result = run_command(*folders)
    assert result.exit_code == 0
    assert "after-end=stop" in result.output


PLAN = 'app = "digits"\ntraces = "synthetic:2"\nseeds = [1]\n'


@pytest.mark.parametrize(
    ("plan", "arguments", "sentence"),
    [
        (PLAN, [], "has no variants"),
        (PLAN + "[variants.A]\n", ["--reference", "B"], "reference = 'B': expected one of ['A']"),
        (PLAN + "[variants.A]\n", ["--target", "3h"], "target = '3h': expected a metric"),
        (PLAN + "[variants.A]\n", ["--workers", "0"], "workers = 0: expected"),
        (PLAN + "[variants.A]\n", ["other.toml"], "expected one plan, or folders"),
        (PLAN + "[variants.A]\n[variants.A.run-config]\nx = 1\n", [], "run-config key 'x'"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence_and_writes_nothing(
    run_command, tmp_path, plan, arguments, sentence
):
    (tmp_path / "plan.toml").write_text(plan)
    result = run_command("plan.toml", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("fedstale: ")
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "comparisons").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "'nowhere' is not a folder"),
        (["fedavg-1", "--target", "acuracy 0.8"], "no run measured 'acuracy'"),
        (["fedavg-1", "--reference", "x"], "reference = 'x': expected one of"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_sentence(run_command, runs, arguments, sentence):
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1


def test_a_run_that_failed_is_left_out_and_told(run_command, tmp_path, pool_here):
    from small_app import SERVER, write_small_app

    server = SERVER.replace(
        "    config = context", '    1 / (context.run_config["rounds"] - 1)\n    config = context'
    )
    app = write_small_app(tmp_path / "app", server=server)
    (tmp_path / "plan.toml").write_text(
        f'app = "{app}"\ntraces = "ideal:6"\nseeds = [1]\n'
        "[variants.A.run-config]\nrounds = 2\n[variants.B.run-config]\nrounds = 1\n"
    )
    result = run_command("plan.toml")
    assert result.exit_code == 1
    assert "Left out: B, seed 1, which failed" in result.output
    assert "fedstale: 1 of the runs failed; the first: B, seed 1: the ServerApp raised" in (
        result.output
    )
    table = json.loads((tmp_path / "comparisons" / "plan" / "comparison.json").read_text())
    assert [run["folder"] for run in table["runs"]] == ["runs/A/1"]
