"""An app may keep a function of the clock where no name of a module leads to it."""

import pytest
from small_app import SERVER, write_small_app

import fedstale

KEPT = {
    "table": ("KEPT = {'sleep': time.sleep, 'now': time.time}", "KEPT['sleep']", "KEPT['now']"),
    "default": ("def nap(s, f=time.sleep): f(s)\ndef now(f=time.time): return f()", "nap", "now"),
    "class": (
        "class Own:\n    sleep, now = map(staticmethod, (time.sleep, time.time))",
        *("Own.sleep", "Own.now"),
    ),
    "partial": ("nap, now = partial(time.sleep), partial(time.time)", "nap", "now"),
    "method": ("now = datetime.now", "time.sleep", "(lambda: now().timestamp())"),
}


@pytest.mark.parametrize("where", KEPT)
def test_a_function_that_an_app_keeps_is_virtual_too(where, tmp_path, capsys):
    kept, sleep, now = KEPT[where]
    head = f"import time\nfrom datetime import datetime\nfrom functools import partial\n{kept}\n"
    ask = f"    before = {now}()\n    {sleep}(5_000)\n    print('passed', {now}() - before)\n"
    at = SERVER.index("    config = context")
    app = write_small_app(tmp_path / "app", server=head + SERVER[:at] + ask + SERVER[at:])
    fedstale.simulate(app, traces="synthetic:20", run_config={"rounds": 1}, out=tmp_path / "run")
    assert "passed 5000.0" in capsys.readouterr().out
