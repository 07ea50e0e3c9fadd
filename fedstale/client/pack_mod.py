"""A Flower client mod by which the arrays of a message travel as one object."""

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from fedstale.errors import ProtocolError
from fedstale.strategies.server.packing import pack, says_so, stating, unpack


class PackMod:
    """Unpacks what a server has packed, and packs the reply; the app sees neither.

    It must be the first of the mods, so that it is the first to see a message and the last to see
    a reply, around mods that change arrays, such as those for privacy:

        app = ClientApp(mods=[PackMod(), fixedclipping_mod])

    `ForecastMod` does the same, and needs no other. The first message to a node comes as it is,
    and the reply goes as it is, with the statement that this node can unpack. A server of fedstale
    packs from then on, and its messages are answered alike; any other server ignores the
    statement. A simulation packs nothing, and no statement is made there.
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the app answer; a message that cannot be unpacked is answered with an error."""
        is_packed = says_so(message.content)
        try:
            message.content = unpack(message.content)
        except ProtocolError as problem:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"{problem}"), reply_to=message)
        reply = call_next(message, context)
        # A simulated node has a device.
        if reply.has_error() or hasattr(context, "device"):
            return reply
        reply.content = (pack if is_packed else stating)(reply.content)
        return reply
