"""The folder of a run on real devices, killed at any write: every update is in its log once."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from dying_disk import DyingDisk
from flwr.app import Context, MetricRecord, RecordDict
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quick_files import IN_MEMORY
from virtual_grid import VirtualGrid, content, identity, record

from fedstale.contrib.audit import AuditRecord, verify
from fedstale.deployment import run_folder
from fedstale.deployment.run_folder import JobLog, recorded
from fedstale.errors import ConfigError, FedstaleError, ResumeError
from fedstale.reports.run import Run
from fedstale.runs import RunFolder
from fedstale.simulation import metrics
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_batch_async
from fedstale.strategies.server import Checkpoints, Versions, checkpoint, read_checkpoint
from fedstale.strategies.server.superlink import SuperLinkGrid

NODES, SLOTS, IN_FLIGHT, BUFFER = range(10, 15), 1000, 4, 3
steps = st.sampled_from(range(1, 35))
shares = st.sampled_from([0.0, 0.3, 0.9, 1.0])


class Folders(RuleBasedStateMachine):
    """Job i adds 1 to element i of the model, so that the model says whose updates are in it."""

    def __init__(self):
        super().__init__()
        self.place = Path(tempfile.mkdtemp(dir=IN_MEMORY)) / "place"
        self.place.mkdir()
        self.folder, self.kept = self.place / "run", self.place / "kept"
        self.disk = DyingDisk(self.place)
        self.sent, self.rounds, self.is_over = [], 1, False
        self.locks, hold = [], checkpoint.hold

        def held(lock):
            if not (owner := hold(lock)):
                self.locks.append(lock)
            return owner

        self.patches = [
            patch.object(checkpoint, "hold", held),
            patch.object(metrics, "report_at_end", Run),
        ]
        for one in self.patches:
            one.start()

    @initialize(rests=st.sampled_from([False, False, True]))
    def begin(self, rests):
        """Keep the log at each version, or once alone, as where there are very many jobs."""
        self.rests = rests
        self.patches += [patch.object(run_folder, "_REST", 1e9 if rests else 0.0)]
        self.patches[-1].start()

    def teardown(self):
        for one in self.patches:
            one.stop()
        self.lose_locks()
        shutil.rmtree(self.place.parent)

    def lose_locks(self):
        """Let go of the folder of checkpoints, as the end of a process does."""
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()
        checkpoint._HELD.clear()

    def answer(self, message, grid):
        slot = len(grid.sent) - 1
        w = message.content["arrays"]["w"].numpy().copy()
        w[slot] += 1.0
        return 1.0 + message.metadata.dst_node_id % 3, content(record(w=w), train_loss=1.0)

    def known(self):
        """Return the version of the last checkpoint, and the share of each job in its model."""
        try:
            state = read_checkpoint(self.kept)
        except ResumeError:
            return 0, {}
        model = Versions.model_in(state["versions"])["w"].numpy()
        version, found = state["versions"]["version"], np.flatnonzero(model)
        # Each version is a mean, of as many updates as had come by then.
        assert model.sum() == pytest.approx(version)
        assert model.max(initial=0.0) < 1.01 / BUFFER
        return version, {f"m{slot}": model[slot] for slot in found}

    def run(self, steps=10**6, share=0.0, during=lambda version: None):
        config = {"checkpoints": str(self.kept), "resume": str(self.kept)}
        context = Context(1, 1, {}, RecordDict(), {"seed": 3, **config})
        grid = VirtualGrid(dict.fromkeys(NODES, self.answer))
        # Ids of messages are not given twice.
        grid.sent = self.sent
        self.lose_locks()
        before = self.known()

        def evaluate(version, arrays):
            during(version)
            return MetricRecord({"loss": float(version)})

        with (
            self.disk.dying(steps, share),
            identity(),
            recorded(SuperLinkGrid(grid, clock=grid), self.folder, context, app="adder") as own,
        ):
            self.log = next(one for one in own.runtime.callbacks if isinstance(one, JobLog))
            self.check_log(*before)
            StaleStrategy(
                schedule=k_batch_async(IN_FLIGHT, BUFFER),
                seed=3,
                stages=[AuditRecord()],
                **config,
            ).start(own, record(w=np.zeros(SLOTS)), self.rounds, timeout=20.0, evaluate_fn=evaluate)
        self.is_over = (self.folder / "summary.json").exists()

    def check_log(self, version, merged):
        """Check that the log of a run that goes on says what its checkpoint says."""
        rows = self.log._by_message
        in_version = self.log.columns["aggregated_version"][: len(self.log)]
        assert len(set(rows.values())) == len(rows) == len(self.log)
        logged = {m for m, row in rows.items() if in_version[row] > 0}
        assert logged == {m for m, row in rows.items() if self.log[row].status == "reported"}
        if self.rests:
            assert logged <= merged.keys()
            return
        assert logged == merged.keys()
        n = np.bincount(in_version[in_version > 0], minlength=version + 1)
        assert n.size == version + 1
        for job, share in merged.items():
            assert share == pytest.approx(1.0 / n[in_version[rows[job]]])

    def wants_another(self, version):
        """Want the folder in another process, which is refused."""
        with pytest.raises(ConfigError, match="is in use by a run"):
            RunFolder(self.folder)
        with (
            patch.object(checkpoint, "_HELD", set()),
            pytest.raises(ConfigError, match="is in use by a run"),
        ):
            Checkpoints(self.kept)

    @rule(deaths=st.lists(st.tuples(steps, shares), min_size=1, max_size=3))
    def die(self, deaths):
        self.rounds += self.is_over
        for at, share in deaths:
            self.run(at, share)

    @rule(deaths=st.lists(st.tuples(steps, shares), max_size=2), more=st.integers(1, 2))
    def come_to_the_end(self, deaths, more):
        self.rounds += more
        self.die(deaths)
        self.run(during=self.wants_another)
        assert self.is_over
        run, merged = Run(self.folder), self.known()[1]
        assert run.status == "finished"
        in_version = run.jobs.aggregated_version
        assert (run.jobs.status == "reported").sum() == (in_version > 0).sum() <= len(merged)
        verified = verify(self.folder)
        assert verified.holds, verified.faults
        assert not list(self.place.rglob("*.part"))
        if self.rests:
            return
        assert (in_version > 0).sum() == len(merged)
        server = run.metrics[run.metrics.source == "server"]
        assert [*server.version] == [*range(self.rounds + 1)]
        assert run.metrics.time_s.is_monotonic_increasing

    @rule(data=st.data(), share=shares, flips=st.booleans())
    def go_on_with_a_damaged_file(self, data, share, flips):
        """Damage a file, go on or not, and put everything back."""
        self.run(20, share)
        files = [file for file in sorted(self.place.rglob("*")) if file.is_file()]
        names = [str(file.relative_to(self.place)) for file in files]
        file = self.place / data.draw(st.sampled_from(names))
        before = self.place.with_name("before")
        shutil.copytree(self.place, before)
        whole = bytearray(file.read_bytes())
        at = int(share * max(len(whole) - 1, 0))
        if flips and whole:
            whole[at] ^= 0xFF
        file.write_bytes(whole if flips else whole[:at])
        for use in (lambda: Run(self.folder).jobs, lambda: Run(self.folder).model, self.run):
            with suppress(FedstaleError):
                use()
        shutil.rmtree(self.place)
        before.rename(self.place)
        self.is_over = (self.folder / "summary.json").exists()

    @invariant()
    def a_reader_says_what_is_there(self):
        if self.is_over:
            run = Run(self.folder)
            assert len(run.jobs)
            version, merged = self.known()
            assert run.summary["rounds"] == version
            slots = {f"m{slot}" for slot in np.flatnonzero(run.model.get("w", 0))}
            assert slots == merged.keys()
            return
        with pytest.raises(ConfigError):
            Run(self.folder)


# What a killed process held, its end lets go of.
KILLED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TestFolders = KILLED(Folders.TestCase)
TestFolders.settings = settings(max_examples=10, stateful_step_count=5, deadline=None)


class ManyFolders(Folders):
    """The same, of more histories."""


TestManyFolders = pytest.mark.slow(KILLED(ManyFolders.TestCase))
TestManyFolders.settings = settings(max_examples=200, stateful_step_count=8, deadline=None)
