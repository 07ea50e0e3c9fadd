"""Peers without a trusted centre: a server that stores and forwards, and sites that screen."""

from fedstale.contrib.peers.relay import Relay
from fedstale.contrib.peers.screen import ScreenMod

__all__ = ["Relay", "ScreenMod"]
