"""What the pool decides by itself, without a cluster."""

import pytest
import ray

from fedstale.comparison import cluster_pool
from fedstale.errors import ConfigError


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_cannot_start_or_raises_is_one_sentence(monkeypatch, is_first):
    class Refused(ray.exceptions.ActorDiedError if is_first else ray.exceptions.RayTaskError):
        actor_init_failed = is_first

        def __init__(self):
            pass

        def __str__(self):
            return "Traceback\n  a line\nfedstale.errors.ConfigError: node a has Ray 1"

    monkeypatch.setattr(ray, "kill", lambda actor: None)
    with pytest.raises(ConfigError, match=r"^a worker of the cluster could not go on: node a has "):
        cluster_pool._require_lost(None, Refused())
    cluster_pool._require_lost(None, ray.exceptions.ActorUnavailableError("lost", None))
