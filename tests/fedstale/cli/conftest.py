"""What the tests of commands share: devices for their runs, and no processes."""

from pool_here import pool_here

__all__ = ["pool_here"]
