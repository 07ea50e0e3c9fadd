"""Lets the reference show examples of docstrings as code.

The sources head them "Example:", as Google's style does; Griffe knows "Examples:" alone.
"""

import re
from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Renames the section while sources are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it in one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
