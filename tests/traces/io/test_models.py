"""The two files of a trained model, of whatever kind: whole, or rejected in a sentence."""

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.io.models import ModelFiles

FILES = ModelFiles(
    what="model",
    made_by="fedstale model train",
    version=("format", 1),
    most_bytes=2_000,
    error=TraceError,
)
ARRAYS = {"w": np.arange(9.0), "n": np.arange(3)}


def read(folder):
    return FILES.arrays(folder, FILES.describe(folder))


@pytest.fixture
def folder(tmp_path):
    FILES.write(tmp_path, ARRAYS, {"provenance": {"seed": 3}})
    return tmp_path


def test_a_model_comes_back_as_it_was_written_and_nothing_lies_beside_it(folder):
    assert FILES.describe(folder)["provenance"] == {"seed": 3}
    for name, value in read(folder).items():
        np.testing.assert_array_equal(value, ARRAYS[name])
    assert {path.name for path in folder.iterdir()} == {"model.toml", "model.safetensors"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.toml", None, r"no model\.toml there: expected .*`fedstale model train`"),
        ("model.toml", lambda data: b"\xff\xfe\x00", "cannot be read"),
        ("model.toml", lambda data: data.replace(b"format = 1", b"format ="), "cannot be read"),
        ("model.toml", lambda data: data.replace(b"= 1", b"= 9"), "format = 9, expected 1"),
        ("model.safetensors", None, "cannot be read"),
        ("model.safetensors", lambda data: data[:-9], "altered or cut short"),
        ("model.safetensors", lambda data: data[:-1] + b"\xff", "altered or cut short"),
        ("model.safetensors", lambda data: data + bytes(3_000), "larger than 2000 bytes"),
    ],
)
def test_what_is_missing_altered_or_of_another_version_is_rejected(folder, name, change, said):
    path = folder / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TraceError, match=said):
        read(folder)


def test_arrays_that_are_not_finite_are_rejected(tmp_path):
    FILES.write(tmp_path, {"w": np.array([np.nan])}, {})
    with pytest.raises(TraceError, match="w holds a number that is not finite"):
        read(tmp_path)
