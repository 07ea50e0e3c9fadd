"""Smaller messages: which format each has, and arrays that are quantised on their way."""

from fedstale.strategies.messages.formats import ByForecast, Format, Messages

__all__ = ["ByForecast", "Format", "Messages"]
