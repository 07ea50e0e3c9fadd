"""Apps loaded from their folders, and messages for them, without any Grid."""

from loaded_apps import load, one_thread, run_identity, small_clothes

__all__ = ["load", "one_thread", "run_identity", "small_clothes"]
