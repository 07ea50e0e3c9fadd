"""Whether the record of a run holds: its chain of lines, and each pick made again."""

from fedstale.verification.verdict import Verification, verify

__all__ = ["Verification", "verify"]
