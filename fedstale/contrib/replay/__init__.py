"""A trace in real time: SuperNodes of this machine act its devices, at its own pace or faster."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.contrib.replay.app_copy import replay_config, write_replayed
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = ["replay_config", "write_replayed"]
