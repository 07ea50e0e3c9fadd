"""Devices that a process makes once for all tests of the platform."""

from shared_fleets import devices_made_once

__all__ = ["devices_made_once"]
