"""A message whose run ends as it comes, in Flower's own pull, and what is left of it."""

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import start_client_internal
from hostile import SUPERLINK, message

from fedstale.flower import supernode

NODE = 7
FLOWERS = start_client_internal.__globals__["_pull_and_store_message"]
CONFIRMS = "confirm_message_received"


def pulls(pull, *ends_at, is_known=True):
    """Pull a message whose run ends at a step; return the run and what is left of the message.

    Args:
        pull: the pull.
        ends_at: steps to which the SuperLink answers that the run has ended.
        is_known: whether the run was; of another one, the app cannot be trusted here.
    """
    objects = ObjectStoreFactory()
    store = objects.store()
    state = NodeStateFactory(objectstore_factory=objects).state()
    state.set_node_id(NODE)
    if is_known:
        state.store_run(Run.create_empty(run_id=1))
    order = message(1, SUPERLINK, NODE, content=RecordDict({"config": ConfigRecord({"n": 1})}))
    contents = {key: one.deflate() for key, one in get_all_nested_objects(order).items()}

    def ends(*given):
        raise RunNotRunningException

    run_id = pull(
        state=state,
        object_store=store,
        **{
            "node_config": {},
            "receive": lambda: (remove_content_from_message(order), get_object_tree(order)),
            "get_run": lambda run_id: Run.create_empty(run_id=run_id),
            "get_fab": lambda fab_hash, run_id: Fab("", b"", {}),
            "pull_object": lambda run_id, key: contents[key],
            CONFIRMS: lambda run_id, message_id: None,
            "trusted_entities": None if is_known else {"somebody": "a key"},
            **dict.fromkeys(ends_at, ends),
        },
    )
    n_tasks = len(state.get_tasks(statuses=["pending"]))
    # Where messages are up to 1.42, and from 1.43 on.
    found = [*state.get_messages_legacy()]
    for to in (NODE, SUPERLINK):
        found += state.get_messages(dst_node_id=to)
    assert found or not any(store.get(key) for key in contents)
    return run_id, n_tasks, len(found)


@pytest.mark.parametrize("steps", [["pull_object"], [CONFIRMS], ["pull_object", CONFIRMS]])
def test_a_message_whose_run_ends_as_it_comes_is_given_to_no_client_app(steps):
    ours = supernode.whole_or_not(FLOWERS)
    assert pulls(ours) == pulls(FLOWERS) == (1, 1, 1)
    # Nobody is to wait for a reply, so nobody may make one: it would go out in place of the next.
    assert pulls(FLOWERS, *steps) == (None, 1, 1)
    assert pulls(ours, *steps) == (None, 0, 0)


def test_there_is_nothing_to_throw_away_of_a_message_that_never_came():
    assert pulls(supernode.whole_or_not(FLOWERS), "receive") == (None, 0, 0)


@pytest.mark.parametrize("step", ["get_run", "get_fab"])
def test_a_run_that_ends_before_its_app_is_here_leaves_nothing(step):
    ours = supernode.whole_or_not(FLOWERS)
    assert pulls(ours, step, is_known=False) == (None, 0, 0)


def test_an_error_that_flower_answers_itself_is_sent_or_thrown_away_with_its_message():
    ours = supernode.whole_or_not(FLOWERS)
    assert pulls(ours, is_known=False)[:2] == (1, 0)
    # From 1.43 on the message is confirmed then, too; before, its reply is refused as it is sent.
    run_id, _, n_left = pulls(ours, CONFIRMS, is_known=False)
    assert (run_id, n_left) in {(None, 0), (1, 1)}


def test_what_fails_otherwise_is_flowers_to_clean_up():
    def fails(*given):
        raise OSError

    def failing(**named):
        return FLOWERS(**named | {"pull_object": fails})

    assert pulls(supernode.whole_or_not(failing)) == (None, 0, 0)
