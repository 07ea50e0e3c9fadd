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
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

_SPACES, _COUNT = {"\n": r" \n ", "\t": " ", "\r": " "}, 40
EXTRAS = {
    "client": ("psutil",),
    "server": ("jinja2", "pandas", "prometheus_client", "pyarrow", "scipy", "threadpoolctl"),
    "torch": ("torch",),
    "agents": ("gymnasium", "stable_baselines3"),
    "ray": ("optuna", "ray"),
    "privacy": ("dp_accounting",),
}
"""Packages that an extra of fedstale brings, by the names that are imported."""


def needs(package: str) -> str:
    """Return that a package is not installed, and the command that installs it.

    An extra comes from where this fedstale came from: a clone or a wheel.

    Args:
        package: name that is imported, of an extra or of a package by itself.

    Example:
        >>> needs("plotly")
        'needs plotly, which is not installed: pip install plotly'
    """
    extra = next((extra for extra, names in EXTRAS.items() if package in names), None)
    command = f"pip install {package}" if extra is None else installing(extra)
    return f"needs {package}, which is not installed: {command}"


def installing(extra: str) -> str:
    """Return the command that adds an extra to this fedstale."""
    # Slow to import, and of no use where nothing is missing.
    import json  # noqa: PLC0415
    from importlib.metadata import distributions  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415
    from shlex import quote  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    # A clone in which it is built has a description of it too, that says nothing of where it is.
    told = (one.read_text("direct_url.json") for one in distributions(name="fedstale"))
    origin = json.loads(next(filter(None, told), "{}"))
    url = urlsplit(origin.get("url", ""))
    place = unquote(url.path)
    if url.scheme != "file" or not Path(place).exists():
        return f"pip install '.[{extra}]' in a clone of fedstale"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{quote(f'{place}[{extra}]')}"


def not_installed(problem: ModuleNotFoundError) -> str | None:
    """Name the installation of a missing package that an extra of fedstale has; else None."""
    package = (problem.name or "").partition(".")[0]
    return needs(package) if any(package in names for names in EXTRAS.values()) else None


def not_loaded(problem: Exception) -> str:
    """Return why an entry point of another package gives nothing, as the end of a sentence.

    Example:
        >>> not_loaded(ModuleNotFoundError(name="plotly"))
        'needs plotly, which is not installed: pip install plotly'
        >>> not_loaded(ValueError("no colour"))
        'cannot be used: ValueError: no colour'
    """
    package = (getattr(problem, "name", None) or "").partition(".")[0]
    if isinstance(problem, ModuleNotFoundError) and package not in ("", "fedstale"):
        return needs(package)
    return f"cannot be used: {first_line(f'{type(problem).__name__}: {problem}')}"


def first_line(text: object) -> str:
    r"""Return the first line of a message that has words; with the next if it ends with a colon.

    Messages may begin with blank lines or rules, also after the name of an exception, and may be
    `printable` already. The place in an app, with which the reason of a failed job ends, stays.

    Example:
        >>> first_line("TypeError: \n\n\tfit returned 2 elements.\nExpected: (client.py:3)")
        'TypeError: fit returned 2 elements. (client.py:3)'
        >>> first_line("TypeError: \n\n\tfit did not return a tuple.\nIt returned:")
        'TypeError: fit did not return a tuple.'
        >>> first_line("\n-----\n")
        ''
    """
    told, place, _ = re.split(r"( \([^()\s]+:\d+\)$|\Z)", str(text), maxsplit=1)
    broken = told.replace(_SPACES["\n"], "\n").splitlines()
    lines = [line.strip() for line in broken if re.search(r"\w", line)]
    first = next(iter(lines), "")
    return (" ".join(lines[:2]) if re.search(r":\W*$", first) else first) + place


def printable(text: str) -> str:
    r"""Show a text in one line that a terminal shows and does not obey.

    Line breaks, controls, and marks that turn the direction of writing are escapes.

    Example:
        >>> print(printable("fast\x1b[2J\n\u202e1"))
        fast\x1b[2J \n \u202e1
    """
    if text.isprintable():
        return text
    escaped = (_SPACES.get(mark) or mark.encode("unicode_escape").decode() for mark in text)
    return "".join(mark if mark.isprintable() else e for mark, e in zip(text, escaped, strict=True))


def quoted(value: object, most: int = 500, show: Callable[[Any], str] = str) -> str:
    r"""Show what somebody else chose, such as a device, as `printable` text of a few characters.

    Args:
        value: mostly a text; what raises when it is shown is named by its type.
        most: characters, > 40; of a longer text both ends, with the number of those left out.
        show: makes a text of it.

    Example:
        >>> print(quoted(ValueError("no\nlayer")), quoted("x" * 50_000_000, most=50))
        no \n layer xxxxx (49,999,990 more characters) xxxxx
    """
    try:
        text = show(value)
    except Exception:
        # A number may have too many digits, and an object of a stranger's may raise anything.
        text = f"a {type(value).__name__} that cannot be shown"
    # No more of it is looked at than could be shown.
    if len(text) <= most and len(whole := printable(text)) <= most:
        return whole
    sizes = (accumulate(len(printable(c)) for c in end) for end in (text[:most], text[:-most:-1]))
    n, m = (sum(size <= (most - _COUNT) // 2 for size in each) for each in sizes)
    left = f"({len(text) - n - m:,} more characters)"
    return f"{printable(text[:n])} {left} {printable(text[len(text) - m :])}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Suggest a known name for an unknown one: the nearest, or all of them.

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
