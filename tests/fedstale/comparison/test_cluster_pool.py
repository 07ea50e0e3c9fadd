"""What the pool decides by itself, without a cluster."""

from pathlib import Path

import pytest
import ray

from fedstale.comparison.cluster_pool import ClusterPool
from fedstale.comparison.plan import PlannedRun, RunJob
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError


class Handle:
    """A worker, as far as the pool asks it."""

    actor = None

    def __init__(self, *, is_on_a_living_node):
        self.is_on_a_living_node = lambda: is_on_a_living_node


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    return ClusterPool.__new__(ClusterPool)


@pytest.fixture
def job():
    config = SimulationConfig(app="digits", traces="synthetic:20")
    return RunJob(run=PlannedRun(variant="one", config=config, folder=Path("run")), begun="new")


def test_a_run_may_lose_any_number_of_machines_but_three_workers(pool, job):
    died, losses = ray.exceptions.ActorDiedError(), {}
    lost_machine, lost_worker = (
        Handle(is_on_a_living_node=False),
        Handle(is_on_a_living_node=True),
    )
    assert all(pool._is_begun_again(lost_machine, job, died, losses) for _ in range(9))
    again = [pool._is_begun_again(lost_worker, job, died, losses) for _ in range(3)]
    assert again == [True, True, False]


def test_a_worker_that_cannot_start_is_one_sentence(pool, job):
    class Refused(ray.exceptions.ActorDiedError):
        actor_init_failed = True

        def __str__(self):
            return "Traceback\n  a line\nfedstale.errors.ConfigError: node a has Ray 1"

    with pytest.raises(ConfigError, match=r"^a worker of the cluster could not go on: node a has "):
        pool._is_begun_again(Handle(is_on_a_living_node=True), job, Refused(), {})
