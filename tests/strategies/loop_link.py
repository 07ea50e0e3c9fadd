"""A SuperLink and its nodes in one process: Flower's grid, its objects, and a ClientApp."""

import threading

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid


class LoopLink:
    """The Runtime API of a SuperLink whose nodes answer when replies are pulled."""

    def __init__(self, apps):
        """Take the ClientApp of each node, by node id."""
        self.apps = apps
        self.contexts = {
            node: Context(
                1, node, {"partition-id": i, "num-partitions": len(apps)}, RecordDict(), {}
            )
            for i, node in enumerate(apps)
        }
        self.lock = threading.Lock()
        self.objects, self.waiting, self.replies = {}, {}, {}
        self.sent, self.answered = [], []
        """Of each message and of each reply: its node and its object tree."""

    def PushMessages(self, request):  # noqa: N802
        ids = []
        for proto, tree in zip(request.messages_list, request.message_object_trees, strict=True):
            self.waiting[proto.metadata.message_id] = proto, tree
            self.sent.append((proto.metadata.dst_node_id, tree))
            ids.append(proto.metadata.message_id)
        missing = {t.object_id for tree in request.message_object_trees for t in flat(tree)}
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=missing, session_id="s")

    def PushObject(self, request):  # noqa: N802
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):  # noqa: N802
        with self.lock:
            for message_id in [i for i in request.message_ids if i in self.waiting]:
                self._answer(*self.waiting.pop(message_id))
            found = [self.replies.pop(i) for i in request.message_ids if i in self.replies]
        return PullAppMessagesResponse(
            messages_list=[proto for proto, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request):  # noqa: N802
        data = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=data)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        return ConfirmMessageReceivedResponse()

    def GetNodes(self, request):  # noqa: N802
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self.apps])

    def close(self):
        pass

    def _answer(self, proto, tree):
        contents = {t.object_id: self.objects[t.object_id] for t in flat(tree)}
        message = inflate_object_from_contents(tree.object_id, contents)
        message.metadata.__dict__["_message_id"] = message_from_proto(proto).metadata.message_id
        node = message.metadata.dst_node_id
        try:
            reply = self.apps[node](message, self.contexts[node])
        except Exception as problem:
            # What Flower's ClientApp process says then.
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{problem}"), reply_to=message
            )
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.objects.update((i, o.deflate()) for i, o in get_all_nested_objects(reply).items())
        about = message_to_proto(remove_content_from_message(reply))
        self.replies[reply.metadata.reply_to_message_id] = about, get_object_tree(reply)
        self.answered.append((node, get_object_tree(reply)))


def flat(tree):
    return list(iterate_object_tree(tree))


def n_objects(tree):
    """Return how many different objects a message consists of."""
    return len({t.object_id for t in flat(tree)})


def grid_of(link):
    """Return Flower's own grid on a SuperLink."""
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="t")
    grid.set_run(Run.create_empty(1))
    grid._client = link
    return grid
