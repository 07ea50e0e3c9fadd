"""Watching a run while it goes on: a live page, and scalars for TensorBoard."""

from fedstale.live.board import Board, observed
from fedstale.live.server import serving

__all__ = ["Board", "observed", "serving"]
