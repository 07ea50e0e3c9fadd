"""The machines of a Ray cluster: how a process joins them, and the files that go and come back."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.cluster.bundles import (
        Bundle,
        Bundles,
        own_folder,
        packed_run,
        placed,
        put_back,
        send,
        unpack,
    )
    from fedstale.cluster.connection import check_address, joined, require_same, versions
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "Bundle",
    "Bundles",
    "check_address",
    "joined",
    "own_folder",
    "packed_run",
    "placed",
    "put_back",
    "require_same",
    "send",
    "unpack",
    "versions",
]
