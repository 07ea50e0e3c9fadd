"""Run mypy on the package as it is installed.

The root folders traces, strategies and agents are sub-packages of fedstale, which type checkers
cannot see in an editable install. This lays them out as a wheel does, in a scratch folder, and
fails if mypy checked fewer files than there are.

Run it with: make typecheck
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Return the exit code of mypy, or 1 if it saw fewer files than exist."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    places = settings["tool"]["setuptools"]["package-dir"]
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "fedstale"
        package.mkdir()
        for part in (ROOT / "fedstale").iterdir():
            (package / part.name).symlink_to(part)
        for name, folder in places.items():
            if name.count(".") == 1:
                (package / name.removeprefix("fedstale.")).symlink_to(ROOT / folder)
        command = [sys.executable, "-m", "mypy", "-p", "fedstale"]
        command += ["--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache")]
        run = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    print(run.stdout, run.stderr, sep="", end="")
    seen = re.search(r"(?:checked|in) (\d+) source files?", run.stdout)
    exist = sum(
        1
        for name, folder in places.items()
        if name.count(".") <= 1
        for path in (ROOT / folder).rglob("*.py")
        if (path.parent / "__init__.py").exists() and "apps" not in path.parent.parent.parts
    )
    if run.returncode == 0 and (seen is None or int(seen.group(1)) < exist):
        print(f"mypy checked {seen and seen.group(1)} files, but {exist} exist")
        return 1
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
