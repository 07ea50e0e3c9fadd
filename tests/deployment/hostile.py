"""Requests of devices that nobody's SuperNode makes."""

import datetime
import hashlib
import time
from base64 import b64encode
from typing import ClassVar

from flwr.app import Metadata, RecordDict
from flwr.app.message import Message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

SUPERLINK = 1


class Device:
    """The owner of a key, who writes what it likes."""

    signatures: ClassVar = []
    """All that were ever made here."""

    def __init__(self, key=None, node_id=0):
        self.key = key or generate_key_pairs()[0]
        self.public = public_key_to_bytes(self.key.public_key())
        self.node_id = node_id

    def headers(self, at=None):
        stamp = (at or datetime.datetime.now(datetime.UTC)).isoformat()
        signature = b64encode(sign_message(self.key, stamp.encode())).decode()
        self.signatures.append(signature)
        return {
            "content-type": PROTOBUF_MEDIA_TYPE,
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": signature,
        }

    def joining(self):
        return ActivateNodeRequest(public_key=self.public, heartbeat_interval=30)

    def asking(self, node_id=None):
        return PullMessagesRequest(node=Node(node_id=node_id or self.node_id))

    def pushing(self, *messages):
        return PushMessagesRequest(
            node=Node(node_id=self.node_id),
            messages_list=[message_to_proto(remove_content_from_message(m)) for m in messages],
            message_object_trees=[get_object_tree(m) for m in messages],
        )


def message(run_id, src, dst, reply_to="", content=None):
    """Return a message, empty at first; a reply ends before the order that it may answer."""
    about = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=src,
        dst_node_id=dst,
        reply_to_message_id=reply_to,
        group_id="",
        created_at=time.time(),
        ttl=500.0 if reply_to else 600.0,
        message_type="train",
    )
    made = Message(metadata=about, content=content or RecordDict())
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


def somewhere():
    """Return an id that names no message."""
    return hashlib.sha256(b"nothing").hexdigest()
