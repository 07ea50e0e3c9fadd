"""The page on records shows what its benchmark has written."""

import importlib.util
import sys

from places import ROOT
from published import rows

BENCHMARKS = ROOT / "benchmarks"


def test_the_page_shows_the_result_and_a_run_that_trains_pays_under_1_percent(monkeypatch):
    spec = importlib.util.spec_from_file_location("record_benchmark", BENCHMARKS / "record.py")
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    assert benchmark.written()[benchmark.PAGE] == benchmark.PAGE.read_text(encoding="utf-8")
    assert rows("record")[0]["within_percent"] < 1.0
