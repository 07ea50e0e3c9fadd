"""Registered tasks are made by their ids, score alike everywhere, and do not change.

The fingerprints in tasks.json are recorded by

    python tests/agents/test_tasks.py

which a change of a task does under another version alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from fedstale.agents import tasks
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy import by_heuristic
from fedstale.errors import ConfigError

RECORDED = Path(__file__).with_name("tasks.json")
PHONES = "fedstale/Selection-phones-v1"
WINDOWS = 8


def fingerprint(task, split):
    """Return numbers that tell whether windows, observations or rewards are still the same."""
    envs = tasks.make_vec(task, WINDOWS, split=split)
    seen, _ = envs.reset(seed=0)
    shown = seen["mask"].sum(axis=1)
    found = {
        "candidates": shown.tolist(),
        "slots": seen["slots"][:, 0].tolist(),
        "features": (seen["features"].sum(axis=(0, 1)) / shown.sum()).tolist(),
        "context": seen["context"].mean(axis=0).tolist(),
    }
    earned = np.zeros(WINDOWS)
    for _ in range(12):
        # The first places, which no rounding of scores can swap.
        seen, rewards, _, _, _ = envs.step(
            np.tile(np.arange(envs.single_action_space.shape[0])[::-1], (WINDOWS, 1))
        )
        earned += rewards
    return {**found, "earned": earned.tolist()}


# Each makes two fleets; the first is of the others' kind.
EVERY = [pytest.param(id, marks=[pytest.mark.slow] * (id != PHONES)) for id in tasks.TASKS]


@pytest.fixture(scope="module", params=EVERY)
def task(request):
    return request.param


@pytest.mark.parametrize("split", tasks.SEEDS)
def test_a_task_is_the_same_as_when_it_was_published(task, split):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[task][split]
    found = fingerprint(task, split)
    for name, values in recorded.items():
        np.testing.assert_allclose(
            found[name], values, rtol=1e-3, atol=1e-3, err_msg=f"{task}, {split}, {name}"
        )


def test_a_task_is_made_by_its_id_alone_one_or_many_of_it(task):
    env = gymnasium.make(task)
    seen, _ = env.reset(seed=3)
    envs = gymnasium.make_vec(task, num_envs=3)
    many, _ = envs.reset(seed=3)
    for name, values in seen.items():
        np.testing.assert_array_equal(many[name][0], values)
    assert env.spec.id == task
    assert envs.observation_space.contains(many)


@pytest.mark.filterwarnings("ignore:.*symmetric and normalized")
def test_gymnasium_finds_nothing_wrong_with_a_task(task):
    check_env(gymnasium.make(task).unwrapped, skip_render_check=True)


def test_devices_that_are_tested_on_are_others_with_the_same_jobs(task):
    train, test = (tasks.scenario(task, split) for split in ("train", "test"))
    np.testing.assert_array_equal(train.kinds.work, test.kinds.work)
    starts = [
        each.traces.channel("availability").window_at_or_after(each.devices, each.start)[0]
        for each in (train, test)
    ]
    assert np.mean(starts[0] == starts[1]) < 0.5


def test_the_score_of_the_heuristic_is_what_it_earns_as_a_server_plays_it():
    task = "fedstale/Selection-phones-v1"
    earned = tasks.score(task, lambda seen: seen["heuristic"], windows=40)
    place, episodes = tasks.scenario(task, "test"), tasks.held_out(task, 40)
    played = [
        episode_metrics(place.simulator(40), episodes, by_heuristic, reward=tasks.REWARD, seed=i)
        for i in range(2)
    ]
    # Chance breaks ties in both.
    again = np.mean([table["reward"].to_numpy() for table in played], axis=0)
    assert np.corrcoef(earned, again)[0, 1] > 0.95
    assert earned.mean() == pytest.approx(again.mean(), rel=0.1)
    np.testing.assert_array_equal(
        tasks.score(task, lambda seen: seen["heuristic"], windows=10), earned[:10]
    )


def test_what_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="Selection-phones-v1"):
        tasks.make("fedstale/Selection-trains-v1")
    with pytest.raises(ConfigError, match="'validation': expected one of train, test"):
        gymnasium.make("fedstale/Selection-phones-v1", split="validation")


@pytest.mark.smoke
def test_registering_and_making_a_task_loads_neither_torch_nor_stable_baselines():
    code = (
        "import sys, gymnasium, fedstale.agents.tasks\n"
        "gymnasium.make('fedstale/Selection-phones-v1').reset(seed=0)\n"
        "print({'torch', 'stable_baselines3'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


if __name__ == "__main__":
    found = {
        task: {
            split: {
                name: np.round(values, 5).tolist()
                for name, values in fingerprint(task, split).items()
            }
            for split in tasks.SEEDS
        }
        for task in tasks.TASKS
    }
    RECORDED.write_text(json.dumps(found, indent=1).replace("\n    ", " ") + "\n", encoding="utf-8")
