import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from made_run import HOSTILE, write_run
from stated_run import asked, stated, told, write_stated

import fedstale
from fedstale.contrib.audit import audited, forecasts
from fedstale.contrib.audit.e_process import log_wealth
from fedstale.errors import ConfigError, ProtocolError
from fedstale.reports.run import Run
from fedstale.runs import ONLINE_SCHEMA
from fedstale.strategies import FedBuff
from fedstale.strategies.types import History, forecast_bias

RNG = np.random.default_rng


def only(audit, device="phone-0"):
    """Return the row of a device."""
    return audit.devices.set_index("device_id").loc[device]


def test_scores_are_those_of_a_loop(tmp_path):
    rng = RNG(0)
    fates = {d: ((p := rng.random(20)), (rng.random(20) < 0.7).astype(float)) for d in (0, 1)}
    jobs = [row for d, (p, kept) in fates.items() for row in told(d, kept, p)]
    audit = audited(write_stated(tmp_path / "run", jobs))
    base = np.mean([kept for _, kept in fates.values()])
    for d, (p, kept) in fates.items():
        row = only(audit, f"phone-{d}")
        assert (row["jobs"], row["tested"], row["repeated"], row["unknown"]) == (20, 20, 0, 0)
        brier, own, fleet, loss = [], [], [], []
        for i, (stated_p, y) in enumerate(zip(p, kept, strict=True)):
            brier.append((stated_p - y) ** 2)
            own.append(((kept[:i].sum() + 1) / (i + 2) - y) ** 2)
            fleet.append((base - y) ** 2)
            loss.append(-np.log(stated_p if y else 1 - stated_p))
        assert row["stated"] == pytest.approx(p.mean())
        assert row["kept"] == pytest.approx(kept.mean())
        assert row["brier"] == pytest.approx(np.mean(brier))
        assert row["log_score"] == pytest.approx(np.mean(loss))
        assert row["skill_own"] == pytest.approx(1 - sum(brier) / sum(own))
        assert row["skill_fleet"] == pytest.approx(1 - sum(brier) / sum(fleet))
        assert row["last_p"] == p[-1]
        over = log_wealth(p, kept, np.zeros(20, np.int64))[-1]
        under = log_wealth(1 - p, 1 - kept, np.zeros(20, np.int64))[-1]
        assert row["e_over"] == pytest.approx(np.exp(over))
        assert row["e_value"] == pytest.approx((np.exp(over) + np.exp(under) + 1) / 3)
        assert row["age_s"] == 9.0


def test_a_job_on_a_statement_for_an_earlier_job_is_not_tested(tmp_path):
    jobs = [
        asked(0, 0),
        stated(0, 10, "interrupted", 0.9),
        stated(0, 200, "interrupted", 0.9),  # nothing was heard of it since
        stated(0, 400, "reported", 0.9),
        stated(0, 600, "interrupted", 0.8),  # stated with the reply of 495 s
    ]
    row = only(audited(write_stated(tmp_path / "run", jobs)))
    assert (row["jobs"], row["tested"], row["repeated"]) == (4, 2, 2)
    assert row["stated"] == pytest.approx(0.85)
    assert row["kept"] == 0.0
    assert row["age_s"] == pytest.approx((9 + 105) / 2)


def test_a_reply_at_the_instant_of_a_sending_is_of_the_job_before(tmp_path):
    """On devices that take no time all happens at once, and the order of sending tells."""
    now = {"delivered_at": 0.0, "reported_at": 0.0}
    fates = ["reported", "interrupted", "reported", "reported"]
    jobs = [stated(0, 0.0, fate, 0.5, **now) for fate in fates]
    row = only(audited(write_stated(tmp_path / "run", jobs)))
    assert (row["tested"], row["repeated"]) == (3, 1)


def test_a_reply_that_the_server_rejects_came_back_in_time(tmp_path):
    jobs = [asked(0, 0), stated(0, 10, "rejected", 0.9), stated(0, 200, "unclaimed", 0.8)]
    row = only(audited(write_stated(tmp_path / "run", jobs)))
    assert (row["tested"], row["kept"]) == (2, 1.0)


@pytest.mark.parametrize("ending", ["client-error", "in-flight"])
def test_a_job_without_an_outcome_has_no_score_and_speaks_for_the_device(tmp_path, ending):
    before = told(0, [0] * 6, 0.9)
    last = [asked(0, 9000), stated(0, 9010, ending, 0.9)]
    both = [
        only(audited(write_stated(tmp_path / name, jobs)))
        for name, jobs in (("a", before), ("b", before + last))
    ]
    assert (both[1]["tested"], both[1]["unknown"]) == (6, 1)
    assert both[1]["brier"] == both[0]["brier"]
    assert both[1]["e_over"] < both[0]["e_over"]
    assert both[1]["e_under"] < both[0]["e_under"]


LIES = {
    "claims p = 1": ("over", lambda p: np.ones(len(p))),
    "claims p = 0": ("under", lambda p: np.zeros(len(p))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_chances_is_found_and_its_direction_named(tmp_path, lie):
    rng = RNG(2)
    direction, claims = LIES[lie]
    p = rng.uniform(0.3, 0.9, 60)
    kept = rng.random(60) < p
    path = write_stated(tmp_path / "run", told(0, kept, claims(p)) + told(1, kept, p))
    audit = audited(path)
    assert audit.alarms["device_id"].tolist() == ["phone-0"]
    assert only(audit)["direction"] == direction
    assert 1 < only(audit)["jobs_to_alarm"] < 40
    assert "1 of 2 devices" in audit.verdict
    assert only(audit, "phone-1")["direction"] == ""


def test_shortened_durations_are_found_and_long_ones_are_not(tmp_path):
    """Jobs take 95 s here: phone-0 says 30 s, phone-1 300 s, phone-2 one of both by turns."""
    jobs = []
    for device, said in ((0, [30.0, 30.0]), (1, [300.0, 300.0]), (2, [30.0, 300.0])):
        for i in range(40):
            jobs += [asked(device, 1000 * i), stated(device, 1000 * i + 10, duration_s=said[i % 2])]
    jobs += told(0, [1], 0.5)  # a run needs a chance somewhere
    audit = audited(write_stated(tmp_path / "run", jobs))
    assert audit.alarms["device_id"].tolist() == ["phone-0"]
    row = only(audit)
    assert (row["direction"], row["durations"], row["last_duration_s"]) == ("short", 40, 30.0)
    assert row["crps_s"] == pytest.approx(65.0)
    assert only(audit, "phone-1")["crps_s"] == pytest.approx(205.0)


def test_bias_is_what_the_record_of_the_server_adds_to_a_chance(tmp_path):
    rng = RNG(3)
    p, kept = rng.random(15), rng.random(15) < 0.5
    history = History()
    done = {"duration_s": 1.0, "examples": 1.0, "loss": 1.0, "square_loss": 1.0}
    for stated_p, y in zip(p, kept, strict=True):
        history.forecast(7, {"p_finish": float(stated_p)}, 0.0)
        history.picked(7, 0.0)
        if y:
            history.finished(7, **done, staleness=0, version=1)
        else:
            history.failed(7)
    row = only(audited(write_stated(tmp_path / "run", told(0, kept, p))))
    own = history.candidates([7])
    added = forecast_bias(own.times_finished, own.times_failed, own.expected_finishes)
    assert added[0] == pytest.approx(row["bias"])
    assert row["bias"] != 0.0


def test_devices_that_were_online_and_never_sent_a_job_are_named(tmp_path):
    rows = [("phone-0", 0.0, 50.0, True), ("phone-2", 0.0, 30.0, True), ("phone-2", 40.0, 45.0, 1)]
    windows = pa.Table.from_pylist(
        [dict(zip(ONLINE_SCHEMA.names, (*r[:3], bool(r[3])), strict=True)) for r in rows],
        schema=ONLINE_SCHEMA,
    )
    path = write_stated(tmp_path / "run", told(0, [1, 0], 0.5), online=windows)
    audit = audited(path)
    row = only(audit, "phone-2")
    assert row["never_picked"]
    assert (row["online_s"], row["jobs"]) == (35.0, 0)
    assert not only(audit)["never_picked"]
    assert any(note.startswith("1 devices were online and never") for note in audit.notes)


def test_several_runs_of_one_trace_are_joined_and_make_no_alarm_of_copies(tmp_path):
    """What happened once, and is told five times, is no more evidence than told once."""
    jobs = told(0, [0] * 3, 0.95)
    runs = [write_stated(tmp_path / name, jobs) for name in "abcde"]
    alone, joined = audited(runs[0]), audited(runs)
    assert only(joined)["tested"] == 15
    assert only(joined)["e_value"] == pytest.approx(only(alone)["e_value"])
    assert only(alone)["e_value"] > 1
    assert joined.alarms.empty
    assert any("joined by node id" in note for note in joined.notes)


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    a = write_stated(tmp_path / "a", told(0, [1, 0], 0.5))
    other_app = write_stated(tmp_path / "b", told(0, [1, 0], 0.5), app="fashion")
    renumbered = write_stated(tmp_path / "c", told(0, [1], 0.5), names=["phone-2", "phone-1", "x"])
    moved = write_stated(tmp_path / "d", told(1, [1], 0.5), names=["x", "phone-0", "y"])
    for runs, words in (
        ([], "expected at least one run"),
        ([a, a], "is given twice"),
        ([a, other_app], "expected runs of one app"),
        ([a, renumbered], "nodes were renumbered"),
        ([a, moved], "nodes were renumbered"),
    ):
        with pytest.raises(ConfigError, match=words) as problem:
            audited(runs)
        assert "\n" not in str(problem.value)


def test_a_run_without_forecasts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no device had stated a chance"):
        audited(write_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("reported_p_finish", 1.5, "expected a chance in \\[0, 1\\]"),
        ("reported_p_finish", -0.1, "expected a chance"),
        ("reported_p_finish", np.inf, "expected a chance"),
        ("reported_duration_s", 0.0, "expected seconds > 0"),
        ("reported_duration_s", np.inf, "expected seconds > 0"),
        ("sent_at", np.nan, "expected the instant of its sending"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, column, value, words):
    path = write_stated(tmp_path / "run", told(0, [1, 0], 0.5))
    table = pq.read_table(path / "events.parquet").to_pandas()
    table.loc[1, column] = value
    table.to_parquet(path / "events.parquet")
    with pytest.raises(ProtocolError, match=words):
        audited(path)


def test_a_log_without_the_columns_is_refused_by_their_names(tmp_path):
    path = write_stated(tmp_path / "run", told(0, [1, 0], 0.5))
    table = pq.read_table(path / "events.parquet").drop_columns(["reported_p_finish"])
    pq.write_table(table, path / "events.parquet")
    with pytest.raises(ConfigError, match="has no column reported_p_finish"):
        audited(path)


def test_notebooks_show_names_of_ill_will_as_text(tmp_path):
    path = write_stated(tmp_path / "run", told(0, [0] * 9, 1.0), names=[HOSTILE, "b", "c"])
    shown = audited(path)._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_a_report_has_the_audit_where_devices_forecast(tmp_path):
    path = write_stated(tmp_path / "run", told(0, [0] * 9, 1.0) + told(1, [1, 0], 0.5))
    figure = forecasts.figure(Run(path))
    assert [row[0] for row in figure.rows] == ["phone-0", "phone-1"]
    assert figure.rows[0][list(figure.header).index("alarm")] == "over"
    assert "1 of 2 devices" in figure.about
    page = Run(path).report(tmp_path / "page.html").read_text()
    assert 'id="plot-forecast-audit"' in page
    assert forecasts.figure(Run(write_run(tmp_path / "none"))) is None


def client(*, loss, examples):
    """Return a ClientApp whose devices state a chance, a loss and examples."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = ArrayRecord({"weights": Array(message.content["arrays"]["weights"].numpy() + 1)})
        metrics = MetricRecord({"train_loss": loss, "num-examples": examples})
        said = ConfigRecord({"p_finish": 0.9, "duration_s": 60.0})
        content = {"arrays": arrays, "metrics": metrics, "fedstale.forecast": said}
        return Message(RecordDict(content), reply_to=message)

    return app


def test_what_the_log_cannot_show_leaves_the_same_log(tmp_path):
    """Three times the loss leaves no trace; examples leave one only where work follows them."""

    def run(name, work, **said):
        out = fedstale.simulate(
            client(**said),
            strategy=FedBuff(4, 2, seed=1),
            initial_arrays={"weights": np.zeros(2)},
            traces="synthetic:20",
            until="10m",
            out=tmp_path / name,
            work=work,
            examples=20,
            epochs=1,
            work_per_example=0.5,
        )
        return out.jobs

    fixed = lambda message: 10.0  # noqa: E731 - the work of a job, whatever is claimed
    honest = run("honest", fixed, loss=1.0, examples=20)
    pd.testing.assert_frame_equal(honest, run("loss", fixed, loss=3.0, examples=20))
    pd.testing.assert_frame_equal(honest, run("examples", fixed, loss=1.0, examples=200))
    assert honest["reported_p_finish"].notna().any()
