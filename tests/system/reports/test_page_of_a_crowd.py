"""A page of a hundred thousand devices stays small."""

from made_run import write_run

from fedstale.reports.run import Run


def test_of_very_many_devices_shares_are_drawn_and_no_longer_every_job(tmp_path):
    crowd = Run(write_run(tmp_path / "crowd", n_jobs=120_000, n_devices=100_000)).report()
    assert len(crowd.read_bytes()) < 500_000
