"""What a run or a measurement was made on: the machine, and releases of packages.

Nothing here says whose machine it is.
"""

import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedstale import __version__

_PACKAGES = ("flwr", "numpy", "pandas", "pyarrow", "torch")


def release(package: str) -> str:
    """Return which release of a package is installed, by whatever name: Flower's nightly has two.

    Raises:
        PackageNotFoundError: there is none.
    """
    with suppress(PackageNotFoundError):
        return version(package)
    return version(f"{package}-nightly")


def versions() -> dict[str, str]:
    """Return releases by name: of fedstale, Python, and packages that this process has loaded."""
    found = {"fedstale": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            with suppress(PackageNotFoundError):
                found[package] = release(package)
    return found


def system() -> str:
    """Return the operating system, its release and the architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def processor() -> str:
    """Return the name of the processor; empty if the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    # Only where no file tells: Python may start a process to find out.
    return next(names, "") or platform.processor()
