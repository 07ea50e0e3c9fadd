"""Files that travel: what is sent, and what a folder holds whenever its filling is killed."""

import io
import shutil
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import ray  # noqa: F401 - which starts a process when it is first imported

from fedstale.cluster import bundles
from fedstale.cluster.bundles import own_folder, packed, packed_run, put_back, unpack
from fedstale.comparison.plan import Plan, state_of
from fedstale.errors import ConfigError
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

PLAN = {
    "app": "digits",
    "traces": "synthetic:20",
    "until": "6m",
    "seeds": [1],
    "run-config": {"strategy": "FedBuff(6, 2)"},
    "variants": {"one": {}},
}
SAME = ("events.parquet", "metrics.parquet", "model.safetensors", "config.toml")


def names(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name for member in tar if member.isfile()}


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_is_unpacked_is_what_was_packed_empty_folders_too(tmp_path):
    (tmp_path / "app" / "inner" / "empty").mkdir(parents=True)
    (tmp_path / "app" / "inner" / "data.bin").write_bytes(b"\0" * 3)
    unpack(packed(tmp_path / "app"), tmp_path / "out")
    assert contents(tmp_path / "out" / "app") == {"inner/data.bin": b"\0" * 3}
    assert (tmp_path / "out" / "app" / "inner" / "empty").is_dir()


def test_of_an_app_hidden_files_caches_and_results_stay_behind(tmp_path):
    app = tmp_path / "app"
    kept = ("pyproject.toml", "my_app/task.py", "my_app/runs/data.csv")
    left = (".git/config", ".env", "my_app/__pycache__/task.pyc", "runs/a/summary.json")
    left += ("tunings/space/trials.json", "my_app.egg-info/PKG-INFO")
    for name in (*kept, *left):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(name, encoding="utf-8")
    assert names(packed(app, of_app=True)) == {f"app/{name}" for name in kept}
    # Of traces all files count.
    assert len(names(packed(app))) == len(kept) + len(left)


def test_a_link_to_the_folder_around_it_is_followed_once(tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    (app / "task.py").write_text("", encoding="utf-8")
    (app / "again").symlink_to(app)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all.csv").write_text("1", encoding="utf-8")
    (app / "data").symlink_to(tmp_path / "data")
    assert names(packed(app, of_app=True)) == {"app/task.py", "app/data/all.csv"}


def test_an_app_that_is_too_large_to_be_sent_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "_MOST", 20_000)
    (tmp_path / "weights.bin").write_bytes(bytes(20_000))
    with pytest.raises(ConfigError, match=r"which is too much to be sent: expected at most 1 GB"):
        bundles.send(tmp_path, of_app=True)


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_nothing_comes_to_lie_outside_of_the_folder(tmp_path, name):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    folder = tmp_path / "inner"
    with suppress(tarfile.FilterError):
        unpack(data.getvalue(), folder)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(folder) for path in found)
    assert not Path("/outside").exists()


def test_links_in_an_archive_are_left_out(tmp_path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo("secrets")
        member.type, member.linkname = tarfile.SYMTYPE, "inner"
        tar.addfile(member)
    unpack(data.getvalue(), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a whole run, and the same one interrupted on the way, as planned runs."""
    folder = tmp_path_factory.mktemp("runs")
    (whole,) = Plan.from_table(PLAN, where="plan").runs(folder / "whole")
    (half,) = Plan.from_table(PLAN, where="plan").runs(folder / "half")
    traces = TraceSet.load("synthetic:20", seed=1)
    simulate(whole.config, whole.folder, traces=traces)
    simulate(half.config, half.folder, traces=traces, pause_at=180.0)
    return whole, half, traces


LOOKED_AT = (3, 7)
"""Steps after which the run goes on; to go on takes a second."""


class Killed(BaseException):
    """Ends a process as nothing in it can hear."""


def killed_at(step, monkeypatch):
    """Let whatever changes a folder be killed before its step of that number."""
    left = [step]

    def counted(own):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return own(*args, **kwargs)

        return call

    for name in ("unlink", "replace"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(bundles.shutil, "rmtree", counted(shutil.rmtree))


@pytest.mark.parametrize("begun", ["new", "half", "done"])
def test_putting_a_run_back_may_be_killed_at_any_step(runs, tmp_path, begun):
    whole, half, traces = runs
    last = packed_run(whole.folder)
    sent = last if begun == "half" else packed_run(half.folder)
    for step in range(100):
        (run,) = Plan.from_table(PLAN, where="plan").runs(tmp_path / str(step))
        run.folder.mkdir(parents=True)
        if begun != "new":
            shutil.copytree(
                (half if begun == "half" else whole).folder, run.folder, dirs_exist_ok=True
            )
        with pytest.MonkeyPatch.context() as patch:
            killed_at(step, patch)
            try:
                put_back(sent, run.folder)
                is_over = True
            except Killed:
                is_over = False
        state = state_of(run)
        # A summary stands for files that are all there.
        if state == "done":
            assert contents(run.folder) == contents(whole.folder)
        elif state == "half" and step in LOOKED_AT:
            simulate(run.config, run.folder, traces=traces, resume=True)
            assert all(
                (run.folder / name).read_bytes() == (whole.folder / name).read_bytes()
                for name in SAME
            )
        if is_over:
            break
        put_back(last, run.folder)
        assert contents(run.folder) == contents(whole.folder)
    assert is_over
    assert step > 5
    assert not list(run.folder.parent.glob(".*.incoming"))


def test_what_a_run_goes_on_from_can_be_packed_while_it_is_written_to(runs):
    _, half, _ = runs
    found = names(packed_run(half.folder, goes_on=True))
    assert "config.toml" in found
    assert any(name.endswith(".checkpoint") for name in found)
    assert not any(name.endswith(".json") or name.endswith(".lock") for name in found)


def test_checkpoints_stay_readable_by_their_owner_alone(runs, tmp_path):
    _, half, _ = runs
    unpack(packed_run(half.folder), tmp_path / "out")
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert modes == {0}
    assert (tmp_path / "out" / "checkpoints").stat().st_mode & 0o077 == 0


def test_a_folder_that_nobody_holds_goes_and_one_that_is_held_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles.tempfile, "tempdir", str(tmp_path))
    with own_folder() as one:
        (one / "file").write_text("", encoding="utf-8")
        lost = Path(tempfile.mkdtemp(dir=one.parent))
        with own_folder() as other:
            assert (one / "file").exists()
            assert other.exists()
            assert not lost.exists()
        assert (one / "file").exists()
        assert not other.exists()
    assert list(one.parent.iterdir()) == []


def test_a_folder_that_others_may_change_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles.tempfile, "tempdir", str(tmp_path))
    with own_folder() as own:
        own.parent.chmod(0o777)
        with pytest.raises(ConfigError, match="belongs to others"), own_folder():
            pass
