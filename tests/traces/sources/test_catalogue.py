import re

import pytest

from fedstale.traces.sources import SOURCES


@pytest.mark.parametrize("name", SOURCES)
def test_every_file_is_fetched_with_encryption_and_checked_where_it_is_known(name):
    files = SOURCES[name].files
    assert len({f.filename for f in files}) == len(files)
    for file in files:
        assert file.url.startswith("https://github.com/")
        assert re.fullmatch(r"[\w.-]+", file.filename)
        assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256)
