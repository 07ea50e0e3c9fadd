"""A Flower that lacks some of its names."""

from missing_names import without

__all__ = ["without"]
