"""The folder of an app: its path, or the name of one that comes with fedstale.

Light, so that a misspelt name is told before Flower and torch are imported.
"""

from pathlib import Path

from fedstale.errors import ConfigError

BUILT_IN = Path(__file__).parent / "apps"


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
