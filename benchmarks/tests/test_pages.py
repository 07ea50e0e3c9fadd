"""Pages of results are what results and templates say, and what comes with fedstale is in them."""

import json
import re
from itertools import product

import pytest
from places import ROOT

import alive
import pages
from agent.many_worlds import VARIED, read_spread
from fedstale.agents import load
from fedstale.agents.policy import digest
from fedstale.agents.policy.scorer import embedded
from fedstale.contrib.suite.judging import TABLE
from lab import results
from lab.kept import Kept, play_missing, played
from lab.results import RESULTS


@pytest.fixture(scope="module")
def written():
    """Return all pages as the results say."""
    return pages.written()


def test_pages_are_what_results_and_templates_say(written):
    for page, text in written.items():
        assert page.read_text(encoding="utf-8") == text, f"{page}: python benchmarks/pages.py"
    assert {ROOT / page for page in pages.PAGES} <= set(written)


def test_results_name_a_script_that_is_there_or_the_commit_that_has_it():
    for path in RESULTS.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        script = re.search(r'"command": "[^"]*?(benchmarks/[\w/]+\.py)', text)
        if script is not None and not (ROOT / script[1]).is_file():
            assert re.search(r'"commit": "[0-9a-f]{40}', text), path


def test_results_are_of_commits_in_the_history():
    if results.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the whole history")
    history = set(results.git("rev-list", "HEAD").split())
    lost = {
        path.stem
        for path in RESULTS.glob("*.json")
        if not path.stem.endswith((results.QUICK, results.UNPUBLISHED, alive.NAME))
        and json.loads(path.read_text(encoding="utf-8")).get("commit") not in history
    }
    assert not lost


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (("a" * 40, "* main"), ""),
        (("a" * 40 + "-dirty", "* main"), "files differ from their commit"),
        (("a" * 40, ""), "no branch has commit aaaaaaaaaa"),
        ((None, ""), "expected a git checkout"),
    ],
)
def test_what_cannot_be_repeated_is_no_result(monkeypatch, tmp_path, capsys, of, why):
    made_at, in_branches = of
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for module in ("lab.results", "lab.kept"):
        monkeypatch.setattr(f"{module}.commit", lambda: made_at)
    monkeypatch.setattr(results, "git", lambda *words: in_branches)
    # A measurement that keeps its runs takes hours, and says so before.
    Kept(tmp_path / "kept.jsonl")
    said = capsys.readouterr().err
    assert why in said
    assert bool(said) == bool(why)
    if why:
        with pytest.raises(RuntimeError, match=why):
            results.write_result("hours", [{"a": 1}], command="python benchmarks/x.py")
        assert not (tmp_path / "hours.json").exists()
        # What took hours is not lost.
        assert results.read_result("hours-unpublished")["rows"] == [{"a": 1}]
    else:
        results.write_result("hours", [{"a": 1}], command="python benchmarks/x.py")
        assert results.read_result("hours")["commit"] == made_at
    results.write_result("hours", [{"a": 1}], command="python benchmarks/x.py", quick=True)
    quick = results.read_result("hours-quick")
    assert quick["command"] == "python benchmarks/x.py --quick"
    assert quick["wall_s"] >= 0


def test_what_measuring_writes_does_not_keep_the_next_from_being_published(monkeypatch, tmp_path):
    # As `make tables` does: one result, its pages, and then the next.
    written = ["benchmarks/results/hours.json", "benchmarks/README.md", "docs/contrib/suite.md"]
    written += ["README.md", str(TABLE.relative_to(ROOT))]
    measured = ["benchmarks/x.py", "fedstale/a.py", "agents/policy/agent.toml"]
    for path in (tmp_path / name for name in written + measured):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "benchmarks" / "results")
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "all")):
        results.git("-C", str(tmp_path), *words)
    made_at = results.commit()
    assert made_at is not None
    assert len(made_at) == 40
    for name in written:
        (tmp_path / name).write_text("2")
    assert results.commit() == made_at
    for name in measured:
        (tmp_path / name).write_text("2")
        assert results.commit() == f"{made_at}-dirty"
        (tmp_path / name).write_text("1")


def test_a_page_says_at_which_commits_its_tables_were_measured(written, monkeypatch):
    text = written[ROOT / "docs/results/how-many.md"]
    for name in ("how_many", "agent_pace"):
        made_at = results.read_result(name)["commit"]
        assert re.search(rf"Measured at .*`{made_at[:10]}` \([a-z_, ]*{name}", text)
    monkeypatch.setattr(pages, "read_result", lambda name: {"commit": "a-dirty", "rows": []})
    assert "with changes that no commit has (a, b, c, d, e)." in pages.made_at("ebdca")


def test_a_page_says_which_of_its_results_have_moved(monkeypatch):
    names = ["adasync", "how_many", "kfac_digits", "kfac_long", "liars"]
    of = {name: {"result": name, "commit": results.read_result(name)["commit"]} for name in names}
    now = {"at": "f" * 40, "what": "hours of row 1: was 1, is 3"}
    found = [
        of["adasync"] | now | {"verdict": "same"},
        of["how_many"] | now | {"verdict": "close"},
        of["kfac_digits"] | now | {"verdict": "moved"},
        of["kfac_long"] | now | {"verdict": "unknown"},
        # Measured again since it was judged.
        of["liars"] | now | {"verdict": "moved", "commit": "e" * 40},
    ]
    monkeypatch.setattr(pages, "rows", lambda name: found if name == "alive" else [])
    told = " Holds at `ffffffffff` (adasync, how_many)."
    told += " kfac_digits has moved by `ffffffffff`: hours of row 1: was 1, is 3."
    assert pages.made_at(names).endswith(f".{told}\n")


def test_a_table_has_words_first_and_numbers_after():
    made = pages.table(["a", "b"], [["x", 1], ["y", 2]])
    assert made == "| a | b |\n|---|---:|\n| x | 1 |\n| y | 2 |"


def test_intervals_are_in_brackets_and_bounds_are_said():
    assert pages.bracketed([1.234, 1.0, 2.0]) == "1.23 [1.00, 2.00]"
    assert pages.bracketed([1.0, 1.0, 1.0]) == "1"
    found = {"mean": 1.5, "low": 1.0, "high": 2.0, "bound": "at least"}
    assert pages.bounded(found) == "≥ 1.50 [1.00, 2.00]"
    assert pages.bounded(None) == "-"


def test_one_row_is_expected_where_a_value_is_asked_for():
    rows = [{"a": 1, "b": 2.0}, {"a": 2, "b": 3.0}]
    assert pages.one(pages.where(rows, a=2), "b") == 3.0
    assert pages.one(pages.where(rows, a=3), "b") is None
    assert pages.where(rows, a=[1, 2]) == rows
    with pytest.raises(ValueError, match="expected one row, found 2"):
        pages.one(rows, "b")


def test_the_embedded_agent_is_the_best_of_the_trainings_that_are_published():
    trained = [row for row in pages.rows("agent_windows") if "training_seed" in row]
    sound = [row for row in trained if not row["faults"]]
    best = min(sound, key=lambda row: row["device_hours"])
    card = (ROOT / "agents/policy/agent.toml").read_text(encoding="utf-8")
    assert f"validation = {best['validation']}" in card
    assert f"seed = {best['training_seed']}\n" in card


def test_real_training_is_of_the_embedded_agent():
    agents = {row["agent"] for row in pages.rows("agent_training") if row.get("agent")}
    assert agents == {digest(load(embedded()).weights)[:12]}


def test_all_real_trainings_of_the_agent_were_played():
    costs = pages.where(pages.rows("agent_training"), about="costs")
    assert {(row["regime"], row["app"]) for row in costs} > {("published", "fashion")}
    assert [row["played"] for row in costs] == [row["wanted"] for row in costs]


def test_the_readme_says_of_the_agent_what_was_measured():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    here = {"about": "selectors", "app": "digits", "fleet": "phones", "regime": "choice"}
    found = pages.where(pages.rows("agent_training"), of_random=1.0, **here)

    def of(selector, schedule):
        row = pages.where(found, selector=selector, schedule=schedule)
        return pages.one(row, "to agent")["device_hours_ratio"]

    oort, rule = "Oort, released constants", "balanced"
    for selector, schedule in [
        (oort, "fedbuff"),
        (rule, "fedbuff"),
        ("balanced, enough", "fedavg"),
    ]:
        ratio = of(selector, schedule)
        assert ratio["bound"] == "exact"
        assert pages.to([ratio["mean"], ratio["low"], ratio["high"]]) in readme
    assert of(oort, "fedavg")["bound"] == "at least"
    assert f"at least {of(oort, 'fedavg')['mean']:.2f} times" in readme
    assert f"the rule {of(rule, 'fedavg')['mean']:.2f} times" in readme
    there = {"about": "selectors", "app": "digits", "schedule": "fedbuff", "selector": rule}
    elsewhere = [
        row["to agent"]["device_hours_ratio"]["mean"]
        for row in pages.where(pages.rows("agent_training"), of_random=1.0, **there)
        if row["fleet"] != "all" and (row["fleet"], row["regime"]) != ("phones", "choice")
    ]
    assert len(elsewhere) == 9
    assert f"other fleets and jobs {min(elsewhere):.2f} to {max(elsewhere):.2f}" in readme


def test_the_readme_says_of_how_many_what_was_measured():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    here = {"to": "rule", "regime": "all", "schedule": "fedavg", "of_random": 1.0, "price": 1.0}
    row = pages.where(pages.rows("how_many"), arm="agent's pace", **here)
    for name, words in [("device_hours_ratio", "the device-hours"), ("hours_ratio", "the hours")]:
        ratio = pages.one(row, name)
        assert ratio["bound"] == "unknown"
        interval = pages.to([ratio["mean"], ratio["low"], ratio["high"]])
        assert f"{interval} times {words}" in readme
    assert "over three fleets, where some runs never arrived" in readme


def test_a_pace_is_no_worse_than_any_number_that_stays_the_same():
    here = {"to": "rule", "regime": "all", "of_random": 1.0}
    found = pages.where(pages.rows("how_many"), **here)
    same = ["rule", "one at a time", "two, a step each", "all, a step each"]
    for schedule, price in product(pages.values(found, "schedule"), pages.values(found, "price")):
        at = pages.where(found, schedule=schedule, price=price)
        cost = {arm: pages.one(pages.where(at, arm=arm), "cost_ratio") for arm in same}
        own = pages.one(pages.where(at, arm="agent's pace"), "cost_ratio")
        assert own["mean"] <= min(each["mean"] for each in cost.values() if each) + 0.005


def test_a_pace_is_worth_most_with_many_jobs_in_flight_as_its_page_says_first():
    found = pages.where(pages.rows("how_many"), to="rule, best pace", of_random=1.0)
    rule, agent = "agent's pace", "agent, agent's pace"

    def cost(regime, schedule, price, arm=rule):
        row = pages.where(found, regime=regime, schedule=schedule, price=price, arm=arm)
        return pages.one(row, "cost_ratio")["mean"]

    for schedule in ("fedavg", "fedbuff"):
        # With 20 in flight, and with 4 to 8, by whom the rule picks.
        assert max(cost("wide", schedule, price) for price in (1.0, 4.0)) < 0.93
        assert cost("wide", schedule, 0.25) < 1.0
        assert all(0.94 < cost("all", schedule, price) < 1.06 for price in (0.25, 1.0))
        assert cost("all", schedule, 4.0) < 0.9
    for regime, price in product(("wide", "all"), (1.0, 4.0)):
        assert cost(regime, "fedbuff", price, agent) < cost(regime, "fedbuff", price) - 0.02
        assert cost(regime, "fedavg", price, agent) > cost(regime, "fedavg", price) - 0.02
    for regime, schedule in product(("wide", "all"), ("fedavg", "fedbuff")):
        assert cost(regime, schedule, 0.25, agent) > cost(regime, schedule, 0.25)


def test_the_spread_of_the_package_is_the_measured_one():
    rows = pages.where(pages.rows("agent_worlds"), part="widths", of="digits and fashion")
    assert read_spread() == {name: pages.one(rows, name) for name in VARIED}


def test_what_is_kept_is_not_run_again_and_a_line_that_was_cut_off_is(tmp_path):
    path, asked = tmp_path / "kept.jsonl", []

    def run(x):
        asked.append(x)
        return {"x": x}

    for _ in range(2):
        kept = Kept(path)
        assert [kept.get(["run", x], lambda x=x: run(x)) for x in (1, 2)] == [{"x": 1}, {"x": 2}]
    assert asked == [1, 2]
    path.write_text(path.read_text()[:-20])
    kept = Kept(path)
    assert ["run", 1] in kept
    assert ["run", 2] not in kept
    kept.get(["run", 2], lambda: run(2))
    assert [kept["run", 1], Kept(path)[["run", 2]]] == [{"x": 1}, {"x": 2}]
    # The order of a mapping's keys does not matter.
    kept.add({"a": 1, "b": 2}, 3)
    assert Kept(path)[{"b": 2, "a": 1}] == 3
    assert kept.commit


def test_tasks_are_played_in_this_process_or_in_others():
    tasks = [(x, abs_of(x)) for x in (-1, -2, -3)]
    for jobs in (1, 2):
        assert dict(played(tasks, jobs)) == {-1: 1, -2: 2, -3: 3}


def test_what_is_not_kept_is_played_once_and_told_of():
    kept, seen = Kept(), []
    kept.add(-2, "before")
    tasks = [(x, abs_of(x)) for x in (-1, -2, -3)]
    for _ in range(2):
        play_missing(kept, tasks, 1, each=lambda *of: seen.append(of))
    assert seen == [(-1, 1), (-3, 3)]
    assert [kept[key] for key, _ in tasks] == [1, "before", 3]


def abs_of(x):
    from functools import partial

    return partial(abs, x)
