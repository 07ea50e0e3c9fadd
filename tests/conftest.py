"""Loads what all suites share."""

pytest_plugins = ["suites"]
