import re

import pytest

from fedstale.traces.sources import SOURCES
from fedstale.traces.trace_set import CHANNELS


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_says_where_it_is_from_and_under_which_terms(name):
    source = SOURCES[name]
    assert source.name == name
    assert source.files
    assert set(source.channels) <= set(CHANNELS)
    assert source.accepts
    assert source.licence in source.licence_line
    assert "\n" not in source.licence_line


@pytest.mark.parametrize("name", SOURCES)
def test_every_file_is_fetched_with_encryption_and_checked_where_it_is_known(name):
    files = SOURCES[name].files
    assert len({f.filename for f in files}) == len(files)
    for file in files:
        assert file.url.startswith("https://github.com/")
        assert re.fullmatch(r"[\w.-]+", file.filename)
        assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        assert (file.sha256 is None) == (file.size_bytes is None)
