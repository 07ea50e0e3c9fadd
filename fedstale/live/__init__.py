"""Watching a run while it goes on: a live page, metrics for Prometheus, scalars for TensorBoard."""

from fedstale.live.board import Board, observed
from fedstale.live.prometheus import exported
from fedstale.live.server import serving

__all__ = ["Board", "exported", "observed", "serving"]
