"""The pages that `fedstale agent train` and `fedstale agent evaluate` write."""

import numpy as np
import pytest
from made_learning import CONTENDERS, played, write_training

from fedstale.agents.evaluation import AGENT, tie_sentence
from fedstale.reports import agent


def test_a_training_is_drawn_from_what_it_recorded(tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(
        agent,
        "write_figures",
        lambda title, lead, drawn, out, **more: figures.update(
            {one.id: one for one in drawn}, lead=lead, **more
        ),
    )
    agent.write_training({7: write_training(tmp_path, seed=7)}, tmp_path)
    low, high, mean, heuristic = figures["advantage"].traces
    assert mean["x"] == [2.0, 4.0, 6.0]
    assert mean["y"] == [-0.5, 0.25, 0.75]
    assert low["y"] == pytest.approx([-0.696, 0.054, 0.554])
    assert (high["y"][0], high["fill"]) == (pytest.approx(-0.304), "tonexty")
    assert heuristic["y"] == [0.0, 0.0]
    gain, time, waste = (trace["y"] for trace in figures["terms"].traces[:3])
    assert [sum(terms) for terms in zip(gain, time, waste, strict=True)] == mean["y"]
    assert len(figures["reward"].traces[0]["x"]) == 6
    assert figures["advantage"].rows[0] == [
        "7",
        "2",
        "-0.500",
        "0.100",
        "-0.250",
        "-0.500",
        "+0.250",
    ]
    assert "seed 7 as it was after update 6 of 6" in figures["lead"]
    assert "+0.750 a window" in figures["lead"]
    assert "training seed: 7" in figures["texts"]["Settings"]


def test_an_evaluation_is_a_forest_of_all_contenders_strongest_first():
    reward, *others = agent.evaluation_figures(played())
    assert [figure.id for figure in others] == ["valid-ratio", "wasted-s"]
    names = [trace["name"] for trace in reward.traces[:-1]]
    assert names == list(CONTENDERS[1:])
    for trace in reward.traces[:-1]:
        ends = trace["error_x"]
        assert ends["array"][0] > 0
        assert ends["arrayminus"][0] > 0
    assert reward.traces[0]["x"][0] == pytest.approx(1.0, abs=0.2)
    advantage = list(reward.header).index("agent's advantage")
    assert (reward.rows[0][0], reward.rows[0][advantage]) == (AGENT, "-")
    assert "nan" not in str(reward.rows).lower()
    assert "left of 0 the agent is better" in others[1].about


def test_contenders_that_do_not_play_are_told_with_the_reason(tmp_path):
    table = played()
    silent = table["contender"].eq("random")
    table.loc[silent, "windows"] = 0
    table.loc[silent, ["mean", "difference", "low", "high"]] = np.nan
    assert "random: it has no window with a value" in " ".join(agent.missing(table))
    table.loc[table["metric"].eq("valid_ratio"), "windows"] = 0
    assert "in no window did a job end" in " ".join(agent.missing(table))


def test_windows_without_a_choice_are_said_to_decide_nothing():
    assert tie_sentence(played()) == ""
    assert "decide nothing" in tie_sentence(played(alike=True))
