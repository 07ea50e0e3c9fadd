"""Apps loaded from their folders, and messages for them, without any Grid."""

from loaded_apps import (
    ask,
    data_of,
    load,
    opened,
    run_identity,
    small_clothes,
    small_play,
)
from one_thread import one_thread

__all__ = [
    "ask",
    "data_of",
    "load",
    "one_thread",
    "opened",
    "run_identity",
    "small_clothes",
    "small_play",
]
