"""Checkpoints as bytes."""

from pathlib import Path
from tempfile import TemporaryDirectory

from fedstale.strategies.server.checkpoint import write_checkpoint


def packed(state):
    """Return a state as the bytes of a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.checkpoint"
        write_checkpoint(path, state)
        return path.read_bytes()
