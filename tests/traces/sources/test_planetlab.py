import io
import tarfile

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import speeds


def host(tmp_path, text, name="host_a", day="20110303"):
    folder = tmp_path / day
    folder.mkdir(exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    return folder / name


NOISE = " ".join(map(str, np.random.default_rng(0).integers(0, 100, 10_000))).encode()
"""Samples that do not pack well: half of their archive ends inside the first file."""


def archive_of(path, names, data):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_what_the_load_leaves_is_offered_for_five_minutes_each(tmp_path):
    traces = speeds.read_hosts(host(tmp_path, "0\n25\n100\n"))
    starts, left, length = traces.compute.segments(0)
    assert starts.tolist() == [0, 300, 600]
    assert left.tolist() == [1.0, 0.75, 0.0]
    assert length == 900
    assert traces.device_ids.tolist() == ["20110303/host_a"]
    assert traces.compute_unit == speeds.HOSTS_UNIT
    assert dict(traces.repairs) == {"kept: record that is not a day of 288 samples": 1}


def test_samples_that_cannot_be_repeat_the_one_before(tmp_path):
    traces = speeds.read_hosts(host(tmp_path, "-\n20\nnan\n130\n-4\n50\n" + "9" * 40))
    _, left, _ = traces.compute.segments(0)
    np.testing.assert_allclose(left, [0.8, 0.8, 0.8, 0.8, 0.8, 0.5, 0.5], rtol=1e-6)
    assert traces.repairs["filled: sample that is not from 0 to 100"] == 5


def test_a_host_without_samples_is_dropped_and_counted(tmp_path):
    host(tmp_path, "", "empty")
    host(tmp_path, "x y", "words")
    host(tmp_path, "5")
    traces = speeds.read_hosts(tmp_path)
    assert traces.device_ids.tolist() == ["20110303/host_a"]
    assert traces.repairs["dropped: host without a readable sample"] == 2


def test_a_folder_that_is_a_day_is_read_too(tmp_path):
    host(tmp_path, "5")
    traces = speeds.read_hosts(tmp_path / "20110303")
    assert traces.device_ids.tolist() == ["20110303/host_a"]


def test_an_archive_of_the_whole_repository_is_read_and_the_rest_left_out(tmp_path):
    names = ["r/README.md", "r/workload/planetlab/20110303/a", "r/other/20110303/a"]
    path = archive_of(tmp_path / "cloudsim.tar.gz", names, b"50")
    traces = speeds.read_hosts(path)
    assert traces.device_ids.tolist() == ["20110303/a"]
    assert traces.repairs["left out: not below a folder of a day"] == 1
    assert traces.repairs["dropped: host and day that occur twice"] == 1


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "empty"), (b"hello", "no readable host"), (b"\xff\x00", "no readable")]
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, data, says):
    with pytest.raises(TraceError, match=says):
        speeds.read_hosts(host(tmp_path, data))


def test_a_folder_without_hosts_is_one_sentence(tmp_path):
    with pytest.raises(TraceError, match="no readable host"):
        speeds.read_hosts(tmp_path)
