"""The three commands of the suite's page, as a newcomer types them into an empty folder."""

import re
import subprocess
import sys

from places import ROOT

COMMAND = [sys.executable, "-c", "import fedstale.cli.main; fedstale.cli.main.app()", "suite"]


def test_a_method_of_the_page_is_judged_from_an_empty_folder(tmp_path):
    page = (ROOT / "docs/contrib/suite.md").read_text(encoding="utf-8")
    method = re.search(r"```python\n(\"\"\"My rule.*?)```", page, re.DOTALL)
    (tmp_path / "my_rule.py").write_text(method[1], encoding="utf-8")

    def called(*words):
        return subprocess.run(
            [*COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    listed = called("list")
    assert listed.returncode == 0, listed.stderr
    assert "phones-v1" in listed.stdout
    looked = called("run", "my_rule.py", "--quick")
    assert looked.returncode == 0, looked.stderr
    assert "A quick look, not comparable to the table." in looked.stdout
    assert re.search(r"^\| \*\*My rule\*\* \| [0-9.]+ \| \d of 2 \|", looked.stdout, re.MULTILINE)
    folder = tmp_path / "suites" / "my_rule" / "phones-v1-digits-quick"
    assert {"row.md", "rows.json", "scenario.toml"} <= {path.name for path in folder.iterdir()}
