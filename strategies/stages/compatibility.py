"""Releases of fedstale on a server and on its devices, which are not upgraded at one instant.

A server's messages to real devices say in their config which release it is, and a device whose
ClientApp has a mod of fedstale answers with its own. Releases that are next to each other (0.4 and
0.5, also 0.4.1 and 0.5.3) work together. Others do not: the device answers with an error before it
trains, and the server rejects a reply; both texts name both releases. What does not say its
release, as a ClientApp without fedstale, is taken as it is, and so is a simulation, whose messages
say none.
"""

import re

from flwr.app import ConfigRecord, RecordDict

from fedstale import __version__
from fedstale.errors import quoted
from fedstale.strategies.stages.base import SharedContent, Stage
from fedstale.strategies.types import Job, RejectionError

RELEASE = "fedstale.release"
"""Key of the release, in the config of a message, and name of a record of its own elsewhere."""
_FORM = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:[.a-z+-].{0,40})?", re.ASCII)


class Compatibility(Stage):
    """States the server's release in messages, and rejects replies of devices that it cannot read.

    Strategies have it on real devices.
    """

    requires = frozenset({"any settings"})

    def __init__(self) -> None:
        self._shared = SharedContent()

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """State the release: in the config, or of a query in a record of its own."""

        def state(made: RecordDict) -> None:
            if job.purpose == "query":
                state_release(made, __version__)
                return
            for name, config in content.config_records.items():
                made[name] = ConfigRecord({**config, RELEASE: __version__})

        return self._shared.of(content, state)

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Check that a device which states its release works together with this server.

        Raises:
            RejectionError: a ProtocolError; it does not, or states no release that can be.
        """
        device = stated_release(content)
        if device is not None and (fault := fault_of_releases(__version__, device)):
            raise RejectionError("release", fault)


def state_release(content: RecordDict, release: str) -> None:
    """Put a release into the content of a query or a reply, in a record of its own."""
    content[RELEASE] = ConfigRecord({RELEASE: release})


def stated_release(content: RecordDict) -> str | None:
    """Return the release that a message or a reply states; None if it states none.

    Raises:
        RejectionError: a ProtocolError; what it states is no release.
    """
    for record in content.values():
        if isinstance(record, ConfigRecord) and RELEASE in record:
            stated = record[RELEASE]
            if not isinstance(stated, str) or _FORM.fullmatch(stated) is None:
                text = f"states the release {quoted(stated, 100, repr)}"
                raise RejectionError("release", f"{text}: expected such as {__version__}")
            return stated
    return None


def fault_of_releases(server: str, device: str) -> str:
    """Return why a server and a device do not work together; empty if they do.

    Example:
        >>> fault_of_releases("0.4.0", "0.5.2")
        ''
        >>> fault_of_releases("0.4.0", "0.6.0")
        'the server has fedstale 0.4.0 and the device 0.6.0: expected releases next to each other'
    """
    (major, minor), (other, further) = map(_numbers, (server, device))
    if major == other and abs(minor - further) <= 1:
        return ""
    return (
        f"the server has fedstale {server} and the device {device}: expected releases next to each "
        "other"
    )


def _numbers(release: str) -> tuple[int, int]:
    found = _FORM.fullmatch(release)
    assert found is not None, "releases are checked where they are read"
    return int(found[1]), int(found[2])
