"""The files whose mutants are tried, and the lines of them that are shown to hold either way."""

import ast
import runpy

from places import ROOT


def test_the_heart_and_its_equivalent_lines_are_there():
    strength = runpy.run_path(str(ROOT / "tests" / "strength.py"))
    plain = {
        file: ast.unparse(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        for file in strength["HEART"]
    }
    gone = [key for key in strength["EQUIVALENT"] if key[2] not in plain[key[0]]]
    assert not gone
