"""A limit whose metric is never measured where it decides: no run ends with it in silence."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from invoked_command import invoked
from written_apps import write_app

from fedstale.traces import Availability, TraceSet

CENTRAL = {"accuracy": 0.5, "lag": 1.0}


@pytest.mark.parametrize(
    ("shape", "central", "until", "told"),
    [
        ("flower", CENTRAL, "acuracy 0.9", "no evaluation has measured 'acuracy': expected 'acc"),
        ("fedstale", CENTRAL, "acuracy 0.9", "no evaluation has measured 'acuracy': expected 'acc"),
        ("older", {"loss": 0.5}, "acuracy 0.9", "'acuracy': expected one of ['loss']"),
        ("messages", None, "los 0.1", "no evaluation has measured 'los': expected 'loss'"),
        (
            "flower",
            CENTRAL,
            "loss 0.1",
            "'loss' is measured by clients that train, and the server's evaluations decide: exp",
        ),
        (
            "older",
            None,
            "acuracy 0.9",
            "no evaluation has measured 'acuracy': expected one of ['lo",
        ),
    ],
)
def test_a_run_whose_target_was_never_measured_fails_and_names_what_was(
    simulated, shape, central, until, told
):
    run = simulated("odd_metrics", constants={"SHAPE": shape, "CENTRAL": central}, until=until)
    assert run.status == "failed"
    assert told in run.reason
    assert run.summary["rounds"] == 2


def test_a_metric_may_come_late_and_is_waited_for_with_a_warning(simulated, caplog):
    constants = {"CENTRAL": {"lag": 1.0}, "LATE": {"accuracy": 0.95}, "ROUNDS": 5}
    with caplog.at_level(logging.WARNING, "fedstale"):
        run = simulated("odd_metrics", constants=constants, until="accuracy 0.9")
    assert (run.status, run.reason) == ("stopped", "reached accuracy 0.95")
    assert run.summary["rounds"] == 5
    (line,) = [one for one in caplog.messages if one.startswith("until = 'accuracy 0.9'")]
    assert "expected one of ['lag']" in line


def test_a_target_that_was_measured_and_never_reached_is_no_mistake(simulated):
    run = simulated("odd_metrics", constants={"CENTRAL": CENTRAL}, until="accuracy 0.9")
    assert (run.status, run.reason) == ("finished", "2 rounds of the app")


def test_a_run_that_gets_stuck_says_it_besides(simulated):
    offline = Availability.of([np.empty((0, 2))] * 4, 100.0)
    never = replace(TraceSet.ideal(4), availability=offline)
    run = simulated("odd_metrics", traces=never, until="acuracy 0.9")
    assert run.status == "stuck"
    assert run.reason.endswith(
        "; until = 'acuracy 0.9': no evaluation has measured 'acuracy'; nothing has been evaluated"
    )


def test_the_command_ends_with_a_failing_code_and_the_sentence(tmp_path, capsys):
    app = write_app(tmp_path / "app", "odd_metrics", CENTRAL=CENTRAL)
    options = ["--traces", "ideal:4", "-o", tmp_path / "run", "--until", "acuracy 0.9"]
    code, _, err = invoked(["simulate", app, *options], capsys)
    assert code == 1
    assert err.splitlines()[-1] == (
        "fedstale: the run failed: 2 rounds of the app; until = 'acuracy 0.9': no evaluation has "
        "measured 'acuracy': expected 'accuracy'"
    )
