"""Tells which tests beside the everyday ones a change touches, by the paths that it changes.

    python tests/affected.py BASE            # prints them, of the change from BASE to what is here
    python tests/affected.py --run BASE      # and runs them

Without BASE a change begins at the newest commit that is six hours older than the last. Where there
is none, and for a path that no line of `TOUCHED` begins, it is all of them. Slow tests are run by
`make test-all` alone.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = "benchmarks/tests"
SYSTEM = "tests/system"
ALL = (PAGES, SYSTEM)
WINDOW_S = 6 * 3600


def system(*names):
    return tuple(f"{SYSTEM}/{name}" for name in names)


TOUCHED = {
    "agents/": system("commands"),
    "benchmarks/": (PAGES,),
    "docs/": (PAGES, *system("project")),
    # What a journey reads; it runs on no other change of a page.
    **dict.fromkeys(
        [
            *("docs/first-app.md", "docs/first-comparison.md"),
            *("docs/flower-apps.md", "docs/strategies.md"),
        ],
        (PAGES, *system("project", "journeys/test_student.py")),
    ),
    "docs/deploy.md": (PAGES, *system("project", "journeys/test_operator.py")),
    **dict.fromkeys(
        ["docs/compare.md", "docs/extend.md", "docs/train-agent.md", "docs/train-your-own.md"],
        (PAGES, *system("project", "journeys/test_researcher.py")),
    ),
    **dict.fromkeys(
        ["docs/forecasting.md", "docs/traces.md"],
        (PAGES, *system("project", "journeys/test_owner_of_a_log.py")),
    ),
    "examples/": system("project/test_examples.py"),
    "examples/pools/": (
        PAGES,
        *system("project/test_pools_app.py", "deployment/test_pools_at_work.py"),
    ),
    "fedstale/apps/": system("apps", "project/test_examples.py", "deployment/test_flwr_run.py"),
    **dict.fromkeys(["examples/fashion/", "examples/shakespeare/"], system("apps")),
    "examples/letters/": system("apps", "contrib/sites"),
    "fedstale/apps/template/": system(
        *("journeys/test_student.py", "journeys/test_operator.py", "project/test_doc_commands.py")
    ),
    "fedstale/cli/": system("cli", "commands", "project/test_doc_commands.py", "journeys"),
    "fedstale/client/": system("client", "deployment"),
    "fedstale/cluster/": system("cluster"),
    "fedstale/comparison/": system("comparison"),
    "fedstale/deployment/": system("deployment"),
    "fedstale/deployment/hosts/": system("deployment", "journeys/test_operator.py"),
    "fedstale/flower/": system("client", "deployment", "simulation", "strategies"),
    "fedstale/live/": system("live"),
    "fedstale/reports/": system("reports"),
    "fedstale/runs/": system("reports", "simulation", "deployment", "cli"),
    "fedstale/contrib/": (),
    "fedstale/contrib/audit/": system("contrib/audit"),
    "fedstale/contrib/peers/": system("contrib/peers"),
    "fedstale/contrib/selectors/": system("deployment/test_chosen_by_property.py"),
    "fedstale/contrib/sites/": system("contrib/sites"),
    "fedstale/compat/": system("simulation", "flower_apps"),
    "fedstale/simulation/": system("simulation", "cli", "flower_apps", "project/test_examples.py"),
    "fedstale/contrib/replay/": system("deployment/test_fidelity.py"),
    "fedstale/contrib/tuning/": system("contrib/tuning"),
    "strategies/": system("strategies"),
    "strategies/messages/": system("simulation", "deployment"),
    "strategies/expression.py": system("strategies", "apps", "comparison", "contrib/tuning"),
    "strategies/server/": system("strategies", "simulation", "deployment"),
    "strategies/stages/": system("strategies", "simulation", "deployment"),
    "traces/": (PAGES, *system("traces")),
    "README.md": (
        PAGES,
        *system("project", "journeys/test_student.py", "journeys/test_operator.py"),
    ),
    "mkdocs.yml": (PAGES,),
    # The everyday tests read these themselves, or nothing does.
    **dict.fromkeys(
        [
            *("tests/agents/", "tests/contrib/", "tests/fedstale/", "tests/project/"),
            *("tests/strategies/", "tests/traces/", "tests/strength.py", "tests/other_flower.py"),
            *(".github/", ".gitignore"),
            *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md"),
        ],
        (),
    ),
}
"""What the tests of other suites have as their subject, by how paths begin; the longest counts."""


def touched(paths):
    """Return the tests that a change of some paths touches, none of them within another."""
    found = set()
    for path in paths:
        if path.startswith(f"{SYSTEM}/"):
            # A test is its own subject; what tests share is that of its folder, or of all.
            is_test = Path(path).name.startswith("test_")
            found.add(path if is_test else str(Path(path).parent))
            continue
        lines = [begin for begin in TOUCHED if path.startswith(begin)]
        found.update(TOUCHED[max(lines, key=len)] if lines else ALL)
    there = sorted(name for name in found if (ROOT / name).exists())
    return [name for name in there if not any(str(p) in found for p in Path(name).parents)]


def git(*words):
    """Return what git prints, or None where it fails."""
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def first_of_change():
    """Return the commit that the change begins at, or None where nothing tells."""
    last = git("show", "--no-patch", "--format=%ct", "HEAD")
    return (last and git("rev-list", "-1", f"--before={int(last) - WINDOW_S}", "HEAD")) or None


def changed(base):
    """Return the paths that differ between a commit and what is here, or None."""
    names = git("diff", "--name-only", "--no-renames", base)
    new = git("ls-files", "--others", "--exclude-standard")
    return None if names is None or new is None else [*names.splitlines(), *new.splitlines()]


def main():
    """Print the tests that the change touches, and run them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run them, in place of this process")
    parser.add_argument("base", nargs="?", help="the commit that the change begins at")
    given = parser.parse_args()
    base = given.base or first_of_change()
    paths = changed(base) if base else None
    chosen = list(ALL) if paths is None else touched(paths)
    print(*chosen, sep="\n", flush=True)
    if given.run and chosen:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", "-n", "auto", *chosen])


if __name__ == "__main__":
    main()
