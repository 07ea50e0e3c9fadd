"""Small runs that are interrupted."""

from buffered_app import buffered
from interruptions import every_version_kept, no_pages

__all__ = ["buffered", "every_version_kept", "no_pages"]
