from functools import partial

import numpy as np
import pytest

from fedstale.agents.env.scenario import stages
from fedstale.agents.training.train import Training
from fedstale.cli.agent_trainings import LOG, Task, train_all
from fedstale.errors import FedstaleError
from fedstale.traces import TraceSet

Short = partial(Training, updates=2, pairs=2, windows=2, validate_every=1, validation_windows=4)


@pytest.fixture(scope="module")
def parts():
    return stages(TraceSet.synthetic(60, days=3, seed=1), forecasts="none")


def tasks(folder, **options):
    return [
        Task(
            training=Short(seed=seed),
            folder=folder / f"seed-{seed}",
            provenance={"traces": "synthetic"},
            **{"resume": False, **options},
        )
        for seed in (4, 5)
    ]


def test_trainings_in_processes_give_the_same_agents_as_one_by_one(parts, tmp_path):
    told = {1: [], 2: []}
    ones, others = (
        train_all(
            tasks(tmp_path / str(workers)),
            parts,
            workers=workers,
            out=tmp_path / str(workers),
            watch=lambda seed, progress, to=told[workers]: to.append((seed, progress.update)),
        )
        for workers in told
    )
    assert sorted(told[1]) == sorted(told[2]) == [(4, 1), (4, 2), (5, 1), (5, 2)]
    for here, there in zip(ones, others, strict=True):
        assert here.provenance == there.provenance
        for name, values in here.weights.items():
            np.testing.assert_array_equal(there.weights[name], values)
    first, second = ones
    assert any((first.weights[name] != second.weights[name]).any() for name in first.weights)
    assert (tmp_path / "2" / LOG).read_text() == ""
    assert not (tmp_path / "2" / ".stages").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_that_is_refused_is_told_in_one_sentence(parts, tmp_path, workers):
    out = tmp_path / "agents"
    (out / "seed-5").mkdir(parents=True)
    (out / "seed-5" / "agent.toml").touch()
    with pytest.raises(FedstaleError, match="seed-5: holds an agent; expected a new folder"):
        train_all(tasks(out), parts, workers=workers, out=out, watch=lambda *_: None)
    assert not (out / ".stages").exists()


def test_a_process_that_dies_is_told_with_its_seed(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstale.cli.agent_trainings._trained", dies)
    with pytest.raises(FedstaleError, match=r"seed 4: its process ended with code 3; .*log\.txt"):
        train_all(tasks(tmp_path)[:1] * 2, parts, workers=2, out=tmp_path, watch=lambda *_: None)


def dies(given, say):
    import os

    os._exit(3)
