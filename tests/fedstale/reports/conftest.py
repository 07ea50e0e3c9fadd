"""A run made by hand, and a page without the library that draws it."""

import re

import pytest
from made_run import write_run

from fedstale.reports.run import Run


@pytest.fixture
def page_of(tmp_path):
    """Return a function that writes a run and its report, and returns the page's own text."""

    def make(**options):
        page = Run(write_run(tmp_path / "run", **options)).report()
        return own_text(page)

    def own_text(page):
        text = page.read_text(encoding="utf-8")
        return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)

    return make
