"""The folder of an app: its path, or the name of one that comes with fedstale.

Light, so that a misspelt name is told before Flower and torch are imported.
"""

import ast
import keyword
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedstale.errors import ConfigError

BUILT_IN = Path(__file__).parent / "apps"
_ANSWERED_BY = {
    "Compression": ("CompressionMod()", r"\bCompressionMod\b"),
    "ForecastRequest": ("ForecastMod().client_app()", r"\bForecastMod\b"),
    "LocalWork": ("fedstale.client.local_steps", r"\blocal_steps\b|\bfedstale\.apps\b"),
    "Relay": ("ScreenMod(...)", r"\bScreenMod\b"),
}
"""What a ClientApp answers a stage by, and how code that has it looks."""

_TEXT = r"\"[^\"]*\"|'[^']*'"


def built_in_apps() -> list[str]:
    """Return the names of the apps that come with fedstale."""
    return sorted(path.parent.name for path in BUILT_IN.glob("*/pyproject.toml"))


def app_folder(app: str | Path) -> Path:
    """Return the folder of an app, which may be named as a built-in one is.

    Raises:
        ConfigError: there is no such app.
    """
    folder = Path(app)
    if not folder.is_dir() and (BUILT_IN / str(app) / "pyproject.toml").is_file():
        folder = BUILT_IN / str(app)
    if not folder.is_dir():
        raise ConfigError(
            f"app = {str(app)!r}: expected a directory with a Flower app, or the built-in one, "
            f"{', '.join(built_in_apps())}"
        )
    return folder.resolve()


def lacking(app: str | Path, text: str) -> str:
    """Name what the ClientApp of an app lacks to answer the stages of a strategy; maybe nothing.

    Args:
        app: its folder, or its name; one that is not there lacks nothing that is known.
        text: of the strategy.
    """
    code = [text]
    with suppress(ConfigError):
        folder = app_folder(app)
        for path in folder.rglob("*.py"):
            is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            with suppress(SyntaxError, ValueError, OSError):
                # Without comments.
                code += [] if is_hidden else [ast.unparse(ast.parse(path.read_text("utf-8")))]
    return ", ".join(dict(unanswered("\n".join(code))).values()) if code[1:] else ""


def unanswered(code: str) -> Iterator[tuple[str, str]]:
    """Yield the stages that an app's strategy has and its ClientApp does not answer.

    Args:
        code: of all of the app, with the text of its strategy.

    Yields:
        Name of the stage, and what the ClientApp would answer it by.

    Example:
        >>> list(unanswered("FedBuff(20, 5, stages=[Compression('int8')])"))
        [('Compression', 'CompressionMod()')]
    """
    for stage, (answer, looks) in _ANSWERED_BY.items():
        if re.search(rf"\b{stage}\(", code) and not re.search(looks, code):
            yield stage, answer


def unstated(code: str) -> tuple[set[str], set[str]]:
    """Return the properties by which a strategy chooses and which no device states, and the stated.

    Args:
        code: of all of an app, with the text of its strategy.

    Example:
        >>> app = "Filtered('regoin != 1 and gpu'), ForecastMod(properties=['region', 'gpu'])"
        >>> unstated(app)[0]
        {'regoin'}
    """
    plain, compared = code.replace("\\", ""), set[str]()
    for text in re.findall(rf"\b(?:Filtered|Quota)\((?:\w+=)?({_TEXT})", plain):
        # Of a quota the text is the name.
        compared |= {*re.findall(r"[A-Za-z_]\w*", re.sub(_TEXT, "", text[1:-1]))}
    lists = re.findall(r"\bproperties=([\[(][^\])]*|\w+)", plain)
    stated = {name for some in lists for name in re.findall(r"['\"]([^'\"]*)['\"]", some)}
    # What is no list of texts is known when it runs.
    is_known = all(some[0] in "[(" for some in lists)
    return (compared - stated - {*keyword.kwlist} if is_known else set()), stated
