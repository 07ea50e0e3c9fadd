"""The version of fedstale, which CITATION.cff and the newest heading of CHANGELOG.md name too."""

__version__ = "0.2.0"
