"""Plans and runs that are compared."""

from pool_here import pool_here

__all__ = ["pool_here"]
