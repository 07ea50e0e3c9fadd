"""Each cell of the table of shapes in docs/apps-that-run.md is still what is found."""

from importlib.util import find_spec

import pytest

from lab.results import read_result
from shapes.apps import SHAPES
from shapes.run import COLUMNS, NAME, is_as_recorded, row

RECORDED = {one["app"]: one for one in read_result(NAME)["rows"]}


def test_the_table_has_every_shape():
    assert list(RECORDED) == [shape.key for shape in SHAPES]
    assert not [row for row in RECORDED.values() if "not run" in row["flower"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_a_shape_runs_as_the_table_says(shape, tmp_path):
    if shape.needs and find_spec(shape.needs) is None:
        pytest.skip(f"{shape.app} needs the package {shape.needs}")
    found = row(shape, tmp_path)
    for column in COLUMNS:
        assert is_as_recorded(column, found, RECORDED[shape.key]), column
