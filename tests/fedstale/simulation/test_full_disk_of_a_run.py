"""A disk that is full when a run is written: one sentence, and what is there goes on."""

import logging
import resource
from contextlib import contextmanager

import numpy as np
import pytest
from flwr.app import ArrayRecord
from tiny import counting_app, fleet
from typer.testing import CliRunner

import fedstale
from fedstale.cli.main import app as command
from fedstale.errors import FedstaleError
from fedstale.runs import RunFolder
from fedstale.strategies import FedBuff
from fedstale.strategies.server import Callback


@contextmanager
def files_of_at_most(n_bytes=None):
    """Let no file grow beyond a size, as on a disk that is full; or beyond what is set inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if n_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Fills(Callback):
    """Fills the disk when a run has ended, before anything of it is written."""

    def __init__(self, n_bytes):
        self.n_bytes = n_bytes

    def ended(self, run, status, reason):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.n_bytes, hard))


def simulated(out, *, model=3, **options):
    return fedstale.simulate(
        counting_app(),
        traces=fleet([[(0.0, 900.0)]] * 4),
        strategy=FedBuff(2, 1, seed=1),
        initial_arrays=ArrayRecord([np.zeros(model)]),
        until="3 rounds",
        out=out,
        work_per_example=1.0,
        evaluate_work_per_example=0.5,
        epochs=1,
        examples=10,
        **options,
    )


@pytest.mark.parametrize(
    ("file", "n_bytes", "model"),
    [("config.toml", 100, 3), ("events.parquet", 2_000, 3), ("model.safetensors", 400_000, 99_999)],
)
def test_what_cannot_be_written_is_one_sentence_and_the_run_goes_on_later(
    tmp_path, file, n_bytes, model
):
    at_once, fills = (n_bytes, None) if file == "config.toml" else (None, Fills(n_bytes))
    with files_of_at_most(at_once), pytest.raises(FedstaleError) as caught:
        simulated(
            tmp_path / "run",
            model=model,
            checkpoint_every=0,
            callbacks=[fills] if fills else [],
        )
    first, *more = str(caught.value).split("; ")
    assert first == f"{tmp_path / 'run' / file} cannot be written: File too large"
    assert more[0].startswith("make room on the disk")
    assert not [path for path in (tmp_path / "run").iterdir() if path.suffix == ".part"]
    if file != "config.toml":
        assert f"fedstale simulate --resume {tmp_path / 'run'} goes on" in str(caught.value)
        again = simulated(tmp_path / "run", model=model, checkpoint_every=0, resume=True)
        assert again.status == "stopped"


def test_a_page_that_cannot_be_written_is_written_later(tmp_path):
    with files_of_at_most(), pytest.raises(FedstaleError) as caught:
        simulated(tmp_path / "run", callbacks=[Fills(100_000)])
    assert f"fedstale report {tmp_path / 'run'} writes its page" in str(caught.value)
    assert "folder that exists" not in str(caught.value)
    assert fedstale.read_run(tmp_path / "run").status == "stopped"
    result = CliRunner().invoke(command, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_log_that_cannot_be_written_ends_and_the_run_goes_on(tmp_path, caplog, capsys):
    logger = logging.getLogger("fedstale")
    with RunFolder.create(tmp_path / "run") as folder, folder.logging(appends=False):
        logger.warning("first")
        with files_of_at_most(20):
            for _ in range(3):
                logger.warning("second")
    assert "first" in (tmp_path / "run" / "log.txt").read_text()
    told = [text for text in caplog.messages if "log.txt ends here" in text]
    assert len(told) == 1
    assert "Traceback" not in capsys.readouterr().err
