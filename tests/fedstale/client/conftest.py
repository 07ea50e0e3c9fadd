"""Lets tests of this folder write where no disk is waited for."""

from quick_files import tmp_path  # noqa: F401
