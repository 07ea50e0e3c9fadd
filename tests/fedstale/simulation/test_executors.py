import numpy as np
import pytest
from flwr.app import Context, RecordDict
from small_app import CLIENT, write_small_app
from tiny import counting_app, message_to

from fedstale.simulation import InlineExecutor, ProcessExecutor
from fedstale.simulation.compat import ErrorCode, identity
from fedstale.simulation.executors import Call
from fedstale.simulation.flower_app import ClientLoader

REFERENCE = "small_app_under_test.client:app"


def calls(n):
    config = {"local-epochs": 2}
    node = {"num-partitions": n}
    with identity(1):
        messages = [message_to(1000 + i) for i in range(n)]
    return [
        Call(m, Context(1, 1000 + i, {**node, "partition-id": i}, RecordDict(), config), seed=i)
        for i, m in enumerate(messages)
    ]


def weights(answers):
    return [a.reply.content["arrays"].to_numpy_ndarrays()[0].tobytes() for a in answers]


def test_processes_give_the_answers_of_one_process_in_the_order_of_the_calls(tmp_path):
    load = ClientLoader(REFERENCE, write_small_app(tmp_path))
    with ProcessExecutor(load, 2) as pool:
        theirs = pool.run(calls(5))
        again = pool.run(list(reversed(calls(5))))
    own = InlineExecutor(load()).run(calls(5))
    assert weights(theirs) == weights(own) == list(reversed(weights(again)))
    assert len(set(weights(own))) == 5


def test_state_written_in_a_worker_comes_back(tmp_path):
    client = CLIENT.replace(
        '    (w,) = message.content["arrays"].to_numpy_ndarrays()\n    for',
        '    context.state["kept"] = MetricRecord({"x": 1})\n'
        '    (w,) = message.content["arrays"].to_numpy_ndarrays()\n    for',
    )
    load = ClientLoader(REFERENCE, write_small_app(tmp_path, client=client))
    with ProcessExecutor(load, 1) as pool:
        (answer,) = pool.run(calls(1))
    assert answer.context.state["kept"]["x"] == 1


def test_a_client_that_kills_its_worker_gets_an_error_reply_and_the_others_their_answers(tmp_path):
    client = CLIENT.replace(
        "    x, y = data(context",
        "    import os\n    if context.node_config['partition-id'] == 1:\n        os._exit(1)\n"
        "    x, y = data(context",
    )
    load = ClientLoader(REFERENCE, write_small_app(tmp_path, client=client))
    with ProcessExecutor(load, 2) as pool:
        answers = pool.run(calls(3))
    assert [a.reply.has_error() for a in answers] == [False, True, False]
    assert answers[1].reply.error.code == ErrorCode.CLIENT_APP_CRASHED


def test_draws_depend_on_the_seed_of_the_call_alone():
    executor = InlineExecutor(counting_app())

    def draw(seed):
        with identity(1):
            message = message_to(1000)
        context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
        (answer,) = executor.run([Call(message, context, seed)])
        return answer.reply.content["metrics"]["draw"]

    first = draw(3)
    np.random.random()
    assert draw(3) == first
    assert draw(4) != first


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_every_seed_of_32_bits_is_accepted(seed):
    with identity(1):
        message = message_to(1000)
    context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    (answer,) = InlineExecutor(counting_app()).run([Call(message, context, seed)])
    assert answer.reply.has_content()
