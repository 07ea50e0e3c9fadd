"""Clients in processes of their own, and in the actors of Ray."""

import pytest
from client_calls import calls, weights
from small_app import CLIENT, write_small_app

from fedstale.errors import ConfigError
from fedstale.simulation import InlineExecutor, ProcessExecutor
from fedstale.simulation.executors.choice import executor_for
from fedstale.simulation.flower_app import FlowerApp


def test_a_worker_killed_once_in_the_middle_changes_no_answer(tmp_path):
    mark = tmp_path / "killed"
    client = CLIENT.replace(
        "    x, y = data(context",
        "    import os, pathlib, signal\n"
        f"    mark = pathlib.Path({str(mark)!r})\n"
        "    if context.node_config['partition-id'] == 2 and not mark.exists():\n"
        "        mark.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    x, y = data(context",
    )
    load = FlowerApp.find(write_small_app(tmp_path / "app", client=client)).load_client
    with ProcessExecutor(load, 2) as pool:
        theirs = pool.run(calls(5))
    assert mark.exists()
    assert weights(theirs) == weights(InlineExecutor(load()).run(calls(5)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_answers_of_one_process_also_when_an_actor_dies(tmp_path):
    pytest.importorskip("ray")
    client = CLIENT.replace(
        "    x, y = data(context",
        "    import os\n    if context.node_config['partition-id'] == 1:\n        os._exit(1)\n"
        "    x, y = data(context",
    )
    good = FlowerApp.find(write_small_app(tmp_path / "good"))
    bad = FlowerApp.find(write_small_app(tmp_path / "bad", client=client))
    load = good.load_client
    with executor_for(good, load(), "ray", 2) as executor:
        theirs = executor.run(calls(5))
    assert weights(theirs) == weights(InlineExecutor(load()).run(calls(5)))
    with executor_for(bad, load(), "ray", 2) as executor:
        answers = executor.run(calls(5))
    assert [a.reply.has_error() for a in answers] == [False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_actors_share_gpus_and_more_than_there_are_is_one_sentence(tmp_path):
    ray = pytest.importorskip("ray")
    app = FlowerApp.find(write_small_app(tmp_path))
    load = app.load_client
    # Ray counts what it is told that there is.
    ray.init(num_cpus=4, num_gpus=1, log_to_driver=False, include_dashboard=False)
    try:
        with executor_for(app, load(), "ray", gpus=0.5) as executor:
            assert executor.description == "2 Ray actors"
            assert weights(executor.run(calls(3))) == weights(InlineExecutor(load()).run(calls(3)))
            assert ray.available_resources().get("GPU", 0.0) == 0.0
        with pytest.raises(ConfigError, match=r"gpus = 0.5 for each of 3 Ray actors: .* has 1;"):
            executor_for(app, load(), "ray", 3, gpus=0.5)
    finally:
        ray.shutdown()
