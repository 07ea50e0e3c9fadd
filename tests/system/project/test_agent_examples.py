"""The learning programs of examples/agents run as they stand, and reach what their page says."""

import json
import re
import runpy

import pytest
from one_thread import one_thread
from places import ROOT

from fedstale.agents import tasks

__all__ = ["one_thread"]

PROGRAMS = {path.stem: path for path in (ROOT / "examples" / "agents").glob("*.py")}
PUBLISHED = {
    row["program"]: row["score"]
    for row in json.loads((ROOT / "benchmarks/results/selection_tasks.json").read_text())["rows"]
    if "program" in row
}
SHORT_OF_IT = 0.5
"""Another processor rounds otherwise, and so learns otherwise."""


@pytest.fixture
def program(request, monkeypatch, tmp_path):
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))
    if request.param == "maskable_ppo":
        pytest.importorskip("sb3_contrib")
    return request.param, runpy.run_path(str(PROGRAMS[request.param]))["main"]


def earned(capsys):
    found = re.search(r"earns ([-\d.]+), the balanced rule ([-\d.]+)", capsys.readouterr().out)
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_a_program_learns_from_a_few_choices_and_says_what_it_earns(program, capsys, monkeypatch):
    name, main = program
    score = tasks.score
    monkeypatch.setattr(tasks, "score", lambda task, policy: score(task, policy, windows=4))
    main(1_024 if name == "maskable_ppo" else 4_096)
    own, heuristic = earned(capsys)
    assert 0.0 < own < 1.5 * heuristic


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_a_program_reaches_what_its_page_says(program, capsys):
    name, main = program
    main(160_000 if name != "maskable_ppo" else 20_480)
    own, _ = earned(capsys)
    assert own > PUBLISHED[name] - SHORT_OF_IT
