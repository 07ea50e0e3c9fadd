import csv
import io
import json
import re

import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.compare import compare


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
    """Return folders of two variants with three seeds each; two of fedavg never get to 0.8."""
    return [
        write_finished(
            tmp_path / f"{strategy}-{seed}",
            seed=seed,
            run_config={"strategy": strategy},
            accuracies=[(0.0, 0.1), (600.0 * seed, last), (3000.0, last)],
        )
        for strategy, lasts in (
            ("fedavg", (0.8, 0.7, 0.7)),
            ("<b>fedbuff</b>", (0.9, 0.9, 0.9)),
        )
        for seed, last in zip((1, 2, 3), lasts, strict=True)
    ]


def test_finished_runs_are_compared(run_command, runs, tmp_path):
    result = run_command(*runs, "--target", "accuracy 0.8")
    assert result.exit_code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    row = {cells[0]: cells[1:] for cells in rows if cells[0].startswith("strategy=")}
    # Times of fedavg: 600 s, and twice never within the hour.
    assert row["strategy=fedavg"][:4] == ["3", "at least 43.33", "1 of 3", "reference"]
    # fedbuff takes 600, 1200 and 1800 s: as fast, and thrice and twice as fast at least.
    assert row["strategy=<b>fedbuff</b>"][2] == "3 of 3"
    assert row["strategy=<b>fedbuff</b>"][3].startswith("at least 1.82 (")
    assert row["strategy=<b>fedbuff</b>"][5].startswith("+0.167 (")
    assert {p.name for p in (tmp_path / "comparisons" / "runs").iterdir()} == {
        f"comparison.{ending}" for ending in ("html", "json", "csv", "md")
    }


def test_programs_get_json_and_csv_with_the_same_numbers(run_command, runs, tmp_path):
    result = run_command(*runs, "--target", "accuracy 0.8", "--json", "--out", tmp_path / "out")
    printed = json.loads(result.stdout)
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {k: v for k, v in printed.items() if k != "out"} == written
    fedbuff = {row["measure"]: row for row in written["table"] if "fedbuff" in row["variant"]}
    assert fedbuff["speed_up"]["note"] == "at least"
    assert fedbuff["speed_up"]["mean"] == pytest.approx(6.0 ** (1 / 3))
    assert fedbuff["device_speed_up"]["note"] == "at least"
    assert printed["verdict"].startswith("strategy=<b>fedbuff</b> ")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "comparison.csv").read_text())))
    found = {(line["variant"], line["measure"]): line for line in lines}
    accuracy = found["strategy=<b>fedbuff</b>", "server accuracy"]
    assert float(accuracy["difference"]) == pytest.approx(1 / 6)
    assert float(accuracy["mean"]) == fedbuff["server accuracy"]["mean"]
    assert found["strategy=fedavg", "time_to_target_s"]["note"] == "at least"


def test_the_report_shows_means_and_obeys_no_name(run_command, runs, tmp_path):
    from read_page import Seen, plots_of

    run_command(*runs, "--target", "accuracy 0.8", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    text = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    plots = plots_of(text)
    assert set(plots) == {"mean-0"}
    (mean,) = (t for t in plots["mean-0"]["traces"] if t.get("name") == "strategy=fedavg")
    # The end of the hour: (0.8 + 0.7 + 0.7) / 3.
    assert mean["y"][-1] == pytest.approx(2.2 / 3)
    assert "b" not in Seen(text).tags
    assert "Strategy: Named; traces: synthetic:5." in "".join(Seen(text).text)
    assert "strategy=<b>fedbuff</b>" in Seen(text).text


def test_what_is_shown_comes_first(run_command, runs, tmp_path, monkeypatch):
    import fedstale

    result = run_command(*runs, "--target", "accuracy 0.8")
    found = fedstale.compare(runs, target="accuracy 0.8")
    assert "ends with the better accuracy: +0.167 (" in found.verdict
    assert result.output.startswith(found.verdict)
    assert repr(found).startswith(f"<Comparison: {found.verdict.splitlines()[0]} ")
    shown = found._repr_html_()
    assert shown.startswith("<p>strategy=&lt;b&gt;fedbuff")
    assert shown.index("the better accuracy") < shown.index("<table")
    page = (tmp_path / "comparisons" / "runs" / "comparison.html").read_text(encoding="utf-8")
    assert page.index("the better accuracy") < page.index("<table")
    text = (tmp_path / "comparisons" / "runs" / "comparison.md").read_text(encoding="utf-8")
    assert text.index("the better accuracy") < text.index("| variant |")


@pytest.mark.parametrize("name", ["strategy", "x" * 40])
def test_nothing_is_wider_than_a_terminal_of_80_columns(
    run_command, write_finished, tmp_path, monkeypatch, name
):
    monkeypatch.delenv("COLUMNS")
    strategies = (
        "FedAvg(fraction_train=0.5)",
        "FedBuff(10, 2)",
        "GapAware(20, 5, selector=Oort())",
    )
    folders = [
        write_finished(
            tmp_path / f"{number}-{seed}",
            seed=seed,
            run_config={name: strategy},
            accuracies=[(0.0, 0.1), (600.0 * seed, 0.7 + 0.05 * number)],
        )
        for number, strategy in enumerate(strategies)
        for seed in (1, 2, 3)
    ]
    result = run_command(*folders, "--target", "accuracy 0.74")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    names = "".join(line[:16].replace(" ", "") for line in lines)
    for strategy in strategies:
        assert f"{name}={strategy}".replace(" ", "") in names, "it is cut off"


def test_each_run_leads_to_its_page_wherever_the_folder_is_moved(run_command, runs, tmp_path):
    from read_page import Seen

    for run in runs:
        (run / "report.html").write_text("a page", encoding="utf-8")
    (runs[0] / "report.html").unlink()
    assert run_command(*runs, "--out", tmp_path / "a b" / "out").exit_code == 0
    places = list(tmp_path.iterdir())
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in places:
        path.rename(moved / path.name)
    page = moved / "a b" / "out" / "comparison.html"
    links = Seen(page.read_text(encoding="utf-8")).links
    assert {(page.parent / link).resolve() for link in links} == {
        moved / run.relative_to(tmp_path) / "report.html" for run in runs[1:]
    }
    written = json.loads((page.parent / "comparison.json").read_text())["runs"]
    assert all((page.parent / run["folder"] / "config.toml").is_file() for run in written)


def test_a_comparison_is_replaced_only_if_asked_or_by_one_of_more_runs(run_command, runs, tmp_path):
    comparison = tmp_path / "comparisons" / "runs" / "comparison.json"
    assert run_command(*runs[:2]).exit_code == 0
    assert run_command(*runs, "--target", "accuracy 0.7").exit_code == 0
    before = comparison.read_bytes()
    result = run_command(*runs[1:])
    assert result.exit_code == 2
    assert "holds a comparison of other runs, such as '../../fedavg-1'" in result.output
    assert "--overwrite" in result.output
    assert comparison.read_bytes() == before
    assert run_command(*runs[1:], "--overwrite").exit_code == 0
    assert len(json.loads(comparison.read_text())["runs"]) == len(runs) - 1
    comparison.write_text("{}")
    result = run_command(*runs)
    assert result.exit_code == 2
    assert "holds no comparison that can be read" in result.output


def test_two_seeds_are_told_by_their_values(run_command, runs):
    result = run_command(*runs[:2], *runs[3:5], "--target", "accuracy 0.8")
    assert "accuracy +0.100, +0.200" in result.output
    assert "is not shown to differ" in result.output
    assert "±" not in result.output


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
    from read_page import Seen

    page = (tmp_path / "comparisons" / "plan" / "comparison.html").read_text(encoding="utf-8")
    assert "failed: the ServerApp raised" in " ".join(Seen(page).text)
    assert Seen(page).links == ["runs/A/1/report.html"]
    (tmp_path / "plan.toml").write_text(
        f'app = "{app}"\ntraces = "ideal:6"\nseeds = [2]\n[variants.B.run-config]\nrounds = 1\n'
    )
    result = run_command("plan.toml")
    assert result.exit_code == 2
    assert "holds a comparison of other runs, such as 'runs/A/1'" in result.output
