"""A whole run of a built-in app loads no library that takes seconds and that it has no use for."""

import subprocess
import sys


def test_a_run_of_a_built_in_app_imports_neither_compilers_nor_statistics(tmp_path):
    # Each of these takes a second or two.
    heavy = {
        "numba",
        "ray",
        "scipy.stats",
        "sklearn",
        "stable_baselines3",
        "sympy",
        "torch._dynamo",
    }
    code = (
        "import sys, fedstale\n"
        "run = fedstale.simulate('digits', traces='synthetic:3', until='2m', out='run')\n"
        "assert len(run.jobs), 'nobody has trained'\n"
        f"print(*sorted(set(sys.modules) & {heavy!r}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == ""
