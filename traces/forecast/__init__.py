"""Forecasts of what a device will do next, from its own past."""
