import tomllib
from importlib import resources

import pytest


@pytest.fixture(scope="session")
def embedded():
    """Return the file of the embedded population."""
    text = (resources.files("fedstale.traces.synthetic") / "synthetic.toml").read_text("utf-8")
    return tomllib.loads(text)
