"""The errors that fedstale raises on purpose; anything else that escapes is a defect.

    FedstaleError
    |-- ConfigError      a setting is unknown, missing or out of range   (also a ValueError)
    |-- TraceError       a trace file or trace cannot mean what it says  (also a ValueError)
    |-- ProtocolError    a reply or a file breaks the contract
    `-- ResumeError      a checkpoint does not belong to this run

Each text says which field, what value it had, what would be accepted and what to do. This module
imports none of the others, so every layer may import it.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_EXTRAS = {
    **dict.fromkeys(("jinja2", "pandas", "pyarrow", "scipy"), "server"),
    "torch": "torch",
    **dict.fromkeys(("gymnasium", "stable_baselines3"), "agents"),
}


def not_installed(problem: ModuleNotFoundError) -> str | None:
    """Return which extra of fedstale brings a package that is missing; None if none does.

    Example:
        >>> not_installed(ModuleNotFoundError(name="torch.nn"))
        "needs torch, which is not installed: pip install 'fedstale[torch]'"
    """
    package = (problem.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    extra = _EXTRAS[package]
    return f"needs {package}, which is not installed: pip install 'fedstale[{extra}]'"


def first_line(text: object) -> str:
    r"""Return the first line of a message that has words; with the next if it ends with a colon.

    Messages may begin with blank lines or rules, also after the name of an exception.

    Example:
        >>> first_line("TypeError: \n\n\tfit did not return a tuple.\nIt returned:")
        'TypeError: fit did not return a tuple.'
        >>> first_line("\n-----\n")
        ''
    """
    lines = [line.strip() for line in str(text).splitlines() if re.search(r"\w", line)]
    first = next(iter(lines), "")
    return " ".join(lines[:2]) if re.search(r":\W*$", first) else first


def nearest(name: object, known: Iterable[str]) -> str:
    """Return what may have been meant by an unknown name: the nearest known one, or all of them.

    Example:
        >>> nearest("trace", ["traces", "seed"])
        "'traces'"
    """
    names = list(known)
    near = get_close_matches(str(name), names, n=1)
    return repr(near[0]) if near else f"one of {names}"


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


class RunEnded(BaseException):
    """The run is over: its limit is reached, or nothing can ever happen again.

    Like KeyboardInterrupt it is no Exception, so that an app's `except Exception` cannot swallow
    it; whoever started the run catches it and keeps what was done.
    """

    def __init__(self, reason: str, *, stuck: bool = False) -> None:
        """End a run, for a reason in words; `stuck` if it could never have gone on."""
        super().__init__(reason)
        self.reason = reason
        self.stuck = stuck
