"""Lets tests of this folder write where no disk is waited for."""

from missing_names import without  # noqa: F401
from quick_files import tmp_path  # noqa: F401
