"""Stand-ins for Flower's examples as app directories, and devices for them."""

import re
from pathlib import Path

import numpy as np

from fedstale.traces import Availability, Series, TraceSet

APPS = Path(__file__).parent / "apps"

PYPROJECT = """
[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "{name}:server"
clientapp = "{name}:client"

[tool.fedstale]
work-per-example = 1.0
evaluate-work-per-example = 0.5
epochs = 1
examples = 4
model-bytes = 100_000
"""


def source_of(name, **constants):
    """Return the text of an app with some of its constants set to other values."""
    text = (APPS / f"{name}.py").read_text(encoding="utf-8")
    for constant, value in constants.items():
        (line,) = [one for one in text.splitlines() if re.match(rf"(\w+, )*{constant}\b.* = ", one)]
        text = text.replace(line, f"{line}\n{constant} = {value!r}")
    return text


def write_app(folder, name, **constants):
    """Write an app directory as `flwr run` accepts it, and return it."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name), encoding="utf-8")
    (folder / f"{name}.py").write_text(source_of(name, **constants), encoding="utf-8")
    return folder


def four_devices():
    """Return devices that never leave, each slower than the one before."""
    return TraceSet(
        device_ids=TraceSet.ideal(4).device_ids,
        availability=Availability.always(4),
        compute=Series.constant(np.array([1.0, 0.9, 0.8, 0.7])),
        downlink=Series.constant(np.full(4, 8e6)),
        uplink=Series.constant(np.full(4, 8e6)),
    )
