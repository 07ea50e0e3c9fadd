"""Plotly.js, the program inside a page that draws its figures; it comes in the package plotly.

Devices and servers without reports do without it: it is asked for by `fedstale[server]` alone.
"""

import importlib.util

from fedstale.errors import ConfigError

_MISSING = "figures need plotly, which is not installed: pip install 'fedstale[server]'"


def why_missing() -> str:
    """Return why no page can be drawn here and what to do, or nothing if one can."""
    return "" if importlib.util.find_spec("plotly") else _MISSING


def plotly_js() -> str:
    """Return the program.

    Raises:
        ConfigError: plotly is not installed.
    """
    if missing := why_missing():
        raise ConfigError(missing)
    # Slow to import, and only a page needs it.
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    return str(get_plotlyjs())
