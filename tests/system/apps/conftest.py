"""Apps loaded from their folders, and messages for them, without any Grid."""

from loaded_apps import load, run_identity
from one_thread import one_thread

__all__ = ["load", "one_thread", "run_identity"]
