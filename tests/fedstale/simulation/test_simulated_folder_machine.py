"""The folder of a simulation, killed at any write: it ends as one that never was."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from dying_disk import DyingDisk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interruptions import SAME, files
from quick_files import IN_MEMORY
from shared_fleets import synthetic

from fedstale.cluster.bundles import packed_run, put_back
from fedstale.contrib.audit.record import RECORD
from fedstale.errors import ConfigError
from fedstale.reports.run import Run
from fedstale.runs import RunFolder, is_empty, is_unfinished
from fedstale.simulation.run import simulate
from fedstale.strategies import Callback

pytestmark = [
    pytest.mark.usefixtures("every_version_kept", "no_pages"),
    # What a killed process held, its end lets go of.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ALL = (*SAME, RECORD)
steps, shares = st.sampled_from([1, 2, *range(1, 45)]), st.sampled_from([0.0, 0.3, 0.9, 1.0])


class Rival(Callback):
    """Wants the folder while the run goes on, as another process would."""

    def __init__(self, folder):
        self.folder = folder

    def new_version(self, run, version, arrays, updates):
        for want in (RunFolder, lambda path: RunFolder.create(path, overwrite=True)):
            with pytest.raises(ConfigError, match="is in use by a run"):
                want(self.folder)


class Folders(RuleBasedStateMachine):
    """A run of a few versions, begun and resumed by whoever finds its folder."""

    config = whole = None
    """Settings of the run, and what it leaves when nothing stops it."""

    def __init__(self):
        super().__init__()
        self.place = Path(tempfile.mkdtemp(dir=IN_MEMORY)) / "place"
        self.place.mkdir()
        self.folder, self.disk = self.place / "run", DyingDisk(self.place)

    def teardown(self):
        shutil.rmtree(self.place.parent)

    def run(self, steps=10**6, share=0.0):
        is_over = (self.folder / "summary.json").exists()
        resume = not is_over and is_unfinished(self.folder)
        assert resume or is_over or is_empty(self.folder)
        with self.disk.dying(steps, share):
            simulate(
                *(self.config, self.folder),
                traces=synthetic(30),
                resume=resume,
                overwrite=is_over,
                callbacks=[Rival(self.folder)],
            )

    @rule(deaths=st.lists(st.tuples(steps, shares), min_size=1, max_size=3))
    def die(self, deaths):
        for at, share in deaths:
            self.run(at, share)

    @rule(deaths=st.lists(st.tuples(steps, shares), max_size=2))
    def come_to_the_end(self, deaths):
        self.die(deaths)
        while not (self.folder / "summary.json").exists():
            self.run()
        assert files(self.folder, ALL) == self.whole
        assert not list(self.place.rglob("*.part"))

    @precondition(lambda self: (self.folder / "config.toml").exists())
    @rule(step=steps, share=shares)
    def be_sent_and_taken_back(self, step, share):
        """Send the folder to a node of a cluster, and die while its files are taken back."""
        is_over = (self.folder / "summary.json").exists()
        data = packed_run(self.folder, goes_on=not is_over)
        with self.disk.dying(step, share):
            put_back(data, self.folder)

    @invariant()
    def a_reader_says_what_is_there(self):
        if (self.folder / "summary.json").exists():
            assert Run(self.folder).status == "finished"
            assert files(self.folder, ALL) == self.whole
            return
        with pytest.raises(ConfigError):
            Run(self.folder)


@pytest.mark.parametrize(
    ("examples", "rules"), [(3, 2), pytest.param(50, 5, marks=pytest.mark.slow)]
)
def test_a_killed_simulation_ends_as_if_it_had_never_been(examples, rules, buffered, tmp_path):
    config = {"rounds": 3, "strategy": "fedbuff", "record": True}
    Folders.config = replace(buffered, run_config=config)
    simulate(Folders.config, tmp_path / "run", traces=synthetic(30))
    Folders.whole = files(tmp_path / "run", ALL)
    run_state_machine_as_test(
        Folders,
        settings=settings(max_examples=examples, stateful_step_count=rules, deadline=None),
    )


@pytest.mark.parametrize("step", range(1, 6))
def test_an_earlier_run_is_removed_so_that_a_kill_leaves_one(step, tmp_path):
    place = tmp_path / "place"
    folder = place / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in (
        "config.toml",
        "events.parquet",
        "summary.json",
        "checkpoints/000000001.checkpoint",
    ):
        (folder / name).write_text("of an earlier run")
    with DyingDisk(place).dying(step, 1.0), RunFolder.create(folder, overwrite=True):
        pass
    with RunFolder.create(folder, overwrite=True):
        assert is_empty(folder)
