"""The errors that fedstale raises on purpose; anything else that escapes is a defect.

    FedstaleError
    |-- ConfigError      a setting is unknown, missing or out of range   (also a ValueError)
    |-- TraceError       a trace file or trace cannot mean what it says  (also a ValueError)
    |-- ProtocolError    a reply or a file breaks the contract
    `-- ResumeError      a checkpoint does not belong to this run

Each text says which field, what value it had, what would be accepted and what to do. This module
imports nothing, so every layer may import it.
"""


class FedstaleError(Exception):
    """Root of all errors that fedstale raises on purpose."""


class ConfigError(FedstaleError, ValueError):
    """A setting is unknown, missing or out of range."""


class TraceError(FedstaleError, ValueError):
    """A trace file or a trace cannot mean what it says."""


class ProtocolError(FedstaleError):
    """A reply or a file breaks the contract that both sides agreed on."""


class ResumeError(FedstaleError):
    """A checkpoint does not belong to the run that wants to resume from it."""
