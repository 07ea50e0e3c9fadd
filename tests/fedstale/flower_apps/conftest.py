"""Stand-ins for Flower's examples on our grid."""

import pytest
from interruptions import every_version_kept, no_pages
from written_apps import four_devices, write_app

import fedstale

__all__ = ["every_version_kept", "no_pages"]


@pytest.fixture
def simulated(tmp_path):
    """Return a function that simulates an app on four devices and returns its run."""
    count = 0

    def go(name, *, constants=None, traces=None, **options):
        nonlocal count
        count += 1
        app = write_app(tmp_path / f"{name}{count}", name, **(constants or {}))
        out = tmp_path / f"run{count}"
        return fedstale.simulate(app, traces=traces or four_devices(), out=out, **options)

    return go
