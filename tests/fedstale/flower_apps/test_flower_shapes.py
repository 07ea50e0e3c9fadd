"""Apps of the shapes of Flower's examples run unchanged, and their runs show what they did."""

import json

import numpy as np
import pytest
from invoked_command import invoked
from shared_fleets import named
from written_apps import source_of, write_app

from fedstale.runs import LOG

FIRST = [0.75, 1.125, 1.3125]
"""The weights after each round in which clients 0 to 3 go half the way to their number."""


def weights(run):
    return next(iter(run.model.values()))


def values(run, source, name):
    rows = run.metrics[(run.metrics.source == source) & (run.metrics.name == name)]
    return dict(zip(rows["version"].tolist(), rows["value"].tolist(), strict=True))


def finished(run, rounds):
    assert (run.status, run.reason) == ("finished", f"{rounds} rounds of the app")
    assert run.summary["rounds"] == rounds
    assert run.summary["virtual_s"] > 0
    assert sum(kind["sent"] for kind in run.summary["messages"].values()) == len(run.jobs)
    return run


def test_message_api(simulated):
    run = finished(simulated("message_api"), 3)
    np.testing.assert_array_equal(weights(run), [FIRST[-1]] * 3)
    assert values(run, "server", "accuracy") == {0: 0.0} | {
        i: w / 1.5 for i, w in enumerate(FIRST, start=1)
    }
    # Of a client it is the sum of its three weights.
    losses = {i: 3 * w for i, w in enumerate(FIRST, start=1)}
    assert values(run, "train", "train_loss") == losses
    assert values(run, "evaluate", "distance")[3] == np.mean(
        [abs(own - FIRST[-1]) for own in range(4)]
    )
    sent = {kind: found["sent"] for kind, found in run.summary["messages"].items()}
    assert sent == {"train": 12, "evaluate": 12}


def test_older_api(simulated):
    run = finished(simulated("older_api"), 3)
    np.testing.assert_array_equal(weights(run), [FIRST[-1]] * 3)
    assert values(run, "server", "accuracy")[3] == FIRST[-1] / 1.5
    assert values(run, "train", "round") == {1: 1, 2: 2, 3: 3}
    assert set(values(run, "evaluate", "loss")) == {1, 2, 3}


def test_mods_around_all_handlers_and_around_one(simulated):
    run = finished(simulated("mods"), 3)
    np.testing.assert_array_equal(weights(run), [14.0, 14.0])  # w <- 2 (w + 1)
    assert values(run, "train", "passed") == {1: 1, 2: 1, 3: 1}
    assert values(run, "evaluate", "weight") == {1: 2, 2: 6, 3: 14}


def test_context_state_lasts_from_round_to_round(simulated):
    run = finished(simulated("state"), 3)
    assert values(run, "train", "times") == {1: 1, 2: 2, 3: 3}
    assert values(run, "train", "own") == {1: 1.5, 2: 3.0, 3: 4.5}
    np.testing.assert_array_equal(weights(run), [9.0, 9.0])


@pytest.mark.parametrize("kind", ["server-fixed", "client-fixed"])
@pytest.mark.usefixtures("no_pages")
def test_updates_clipped_by_flowers_wrappers_move_the_model_by_the_norm(simulated, kind):
    run = finished(simulated("privacy", constants={"KIND": kind}), 3)
    norms = values(run, "server", "norm")
    assert [norms[i] for i in range(4)] == pytest.approx([0, 0.5, 1.0, 1.5])
    assert np.linalg.norm(weights(run)) == pytest.approx(1.5)


@pytest.mark.parametrize("kind", ["server-adaptive", "client-adaptive", "local"])
@pytest.mark.usefixtures("no_pages")
def test_wrappers_that_adapt_and_mods_that_add_noise_bound_each_step(simulated, kind):
    run = finished(simulated("privacy", constants={"KIND": kind}), 3)
    norms = values(run, "server", "norm")
    assert 0 < norms[1] < norms[2] < norms[3] < 3 * 2.0, "unclipped steps have norm 2"


@pytest.mark.parametrize("kind", ["server-fixed", "server-adaptive"])
@pytest.mark.usefixtures("no_pages")
def test_noise_of_a_wrapper_is_in_the_model_and_the_same_for_a_seed(simulated, kind):
    noisy = {"KIND": kind, "NOISE": 0.1}
    first, again = (simulated("privacy", constants=noisy) for _ in range(2))
    other = simulated("privacy", constants=noisy, seed=1)
    assert np.unique(weights(first)).size == 4, "noise is drawn for each weight"
    np.testing.assert_array_equal(weights(first), weights(again))
    assert (weights(first) != weights(other)).all()


def test_secure_aggregation(simulated):
    run = finished(simulated("secure_aggregation"), 2)
    np.testing.assert_allclose(weights(run), [FIRST[1]] * 3, atol=1e-3)
    # Four stages a round, of which each is a message of training to each client.
    assert run.summary["messages"]["train"]["sent"] == run.jobs["status"].eq("reported").sum() == 32
    assert run.jobs.groupby("round").size().to_dict() == {1: 16, 2: 16}
    assert values(run, "server", "accuracy")[2] == pytest.approx(FIRST[1] / 1.5, abs=1e-3)


def test_bagging_of_trees_that_travel_as_bytes(simulated):
    run = finished(simulated("bagging"), 3)
    model = json.loads(weights(run).tobytes())["learner"]["gradient_booster"]["model"]
    assert [tree["id"] for tree in model["trees"]] == list(range(12))
    assert sorted(tree["leaf"] for tree in model["trees"]) == sorted([0, 1, 2, 3] * 3)
    assert [tree["after"] for tree in model["trees"]] == [0] * 4 + [4] * 4 + [8] * 4
    assert values(run, "evaluate", "auc")[3] == 1 - 1 / 13


def test_analytics_show_queries_by_action_and_no_training(simulated):
    run = finished(simulated("analytics"), 4)
    messages = run.summary["messages"]
    assert {kind: found["reported"] for kind, found in messages.items()} == {
        "query.range": 16,
        "query.histogram": 16,
    }
    assert all(found["bytes"] > 0 for found in messages.values())
    assert run.model == {}
    assert values(run, "query", "most") == dict.fromkeys(range(1, 5), 8.5)


@pytest.mark.parametrize(
    ("until", "sent", "reason"),
    [("2 rounds", 16, "reached 2 rounds"), ("most 8.5", 4, "reached most 8.5")],
)
def test_analytics_stop_after_rounds_or_at_a_metric_and_send_no_more(
    simulated, until, sent, reason
):
    run = simulated("analytics", until=until)
    assert (run.status, run.reason) == ("stopped", reason)
    # A metric ends a run when the app sends again, here in the midst of its first round.
    assert len(run.jobs) == sent


@pytest.mark.parametrize("states", [True, False])
def test_a_loop_of_the_app_with_named_actions_has_rounds_metrics_and_models(simulated, states):
    constants = {"STATES_ROUND": states}
    run = finished(simulated("own_loop", constants=constants), 3)
    assert list(run.summary["messages"]) == ["train.embed", "train.step", "evaluate.global"]
    assert values(run, "evaluate", "accuracy") == {i: w / 1.5 for i, w in enumerate(FIRST, start=1)}
    assert set(values(run, "train", "train_loss")) == {1, 2, 3}
    np.testing.assert_array_equal(weights(run), [FIRST[-1]] * 3)


def test_pushed_training_whose_replies_no_one_asks_for_changes_the_state_before_the_next_query(
    simulated,
):
    run = finished(simulated("pushed"), 3)
    assert values(run, "query", "times") == {1: 0, 2: 1, 3: 2}
    steps = run.jobs[run.jobs.kind == "train.step"]
    assert steps["status"].tolist() == ["unclaimed"] * 8 + ["in-flight"] * 4
    assert run.summary["messages"]["train.step"]["reported"] == 0


@pytest.mark.parametrize(("until", "model"), [("2 rounds", FIRST[1]), ("accuracy 0.74", FIRST[1])])
def test_a_loop_of_the_app_stops_with_the_model_that_it_had_made(simulated, until, model):
    run = simulated("own_loop", constants={"ROUNDS": 1000}, until=until)
    assert run.status == "stopped"
    np.testing.assert_array_equal(weights(run), [model] * 3)


def test_error_replies_cost_their_jobs_and_the_summary_says_where_clients_failed(simulated):
    run = finished(simulated("error_replies"), 3)
    np.testing.assert_array_equal(weights(run), [7.5, 7.5])  # each round the mean of 2 and 3
    source = source_of("error_replies").splitlines()

    def line(text):
        return f"error_replies.py:{1 + next(i for i, one in enumerate(source) if text in one)}"

    assert run.summary["client_errors"] == [
        {
            "error": "FileNotFoundError: no data to evaluate",
            "where": line("no data to evaluate"),
            "jobs": 9,
            "devices": 3,
        },
        {
            "error": "FileNotFoundError: no data of partition 0",
            "where": line("no data of partition"),
            "jobs": 3,
            "devices": 1,
        },
        {
            "error": "LinAlgError: Singular matrix",
            "where": line("np.linalg.inv"),
            "jobs": 3,
            "devices": 1,
        },
    ]
    page = run.report().read_text(encoding="utf-8")
    assert "Commonest client errors" in page
    assert line("np.linalg.inv") in page


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_strategy_with_a_start_of_its_own(simulated, otherwise):
    run = finished(simulated("own_start", constants={"AGGREGATES_OTHERWISE": otherwise}), 4)
    accuracy = values(run, "server", "accuracy")
    assert [accuracy[i] for i in (1, 2)] == [w / 1.5 for w in FIRST[:2]]
    assert set(accuracy) == set(values(run, "train", "train_loss")) == {1, 2, 3, 4}
    # Where it aggregates by itself, its models are those that it sends.
    assert weights(run).max() / 1.5 == accuracy[3 if otherwise else 4]


@pytest.mark.parametrize("until", ["2 rounds", "accuracy 0.7"])
def test_a_strategy_with_a_start_of_its_own_can_be_stopped(simulated, until):
    run = simulated("own_start", until=until)
    assert (run.status, run.summary["rounds"]) == ("stopped", 2)
    assert weights(run)[0] == FIRST[1]


@pytest.mark.parametrize("ours", [False, True])
def test_rounds_of_several_starts_count_on(simulated, ours):
    run = finished(simulated("two_starts", constants={"OURS": ours}), 5)
    assert list(values(run, "train", "train_loss")) == [1, 2, 3, 4, 5]
    # The first model of each start is evaluated as the last of the one before.
    evaluated = run.metrics[run.metrics.source == "server"]["version"].tolist()
    assert evaluated == [0, 1, 2, 2, 3, 4, 4, 5]
    train = run.jobs[run.jobs.kind == "train"]
    if ours:
        merged = train[train.aggregated_version >= 0]
        assert merged.groupby("aggregated_version").size().to_dict() == dict.fromkeys(
            range(1, 6), 2
        )
        is_stale = merged["aggregated_version"] - 1 - merged["base_version"]
        assert (is_stale == merged["staleness"]).all()
    else:
        assert train.groupby("round").size().to_dict() == dict.fromkeys(range(1, 6), 4)


def test_the_limit_of_rounds_holds_over_several_starts(simulated):
    run = simulated("two_starts", until="3 rounds")
    assert (run.status, run.reason) == ("stopped", "reached 3 rounds")
    assert set(run.metrics["version"]) == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Return a file of devices for the command line."""
    file = tmp_path_factory.mktemp("fleet") / "desktops.parquet"
    named("synthetic:20@desktops").write(file)
    return file


@pytest.mark.parametrize("log", ["plain", "json"])
def test_what_an_app_prints_and_logs_is_shown_once(tmp_path, fleet, capsys, log):
    app = write_app(tmp_path / "app", "own_start")
    flags = ["--json"] if log == "json" else []
    command = ["simulate", app, "--traces", fleet, "--out", tmp_path / "run"]
    code, out, err = invoked([*command, *flags], capsys)
    assert code == 0, err
    printed = err if log == "json" else out
    best = [line for line in printed.splitlines() if "best so far" in line]
    assert len(best) == len(set(best)) > 0
    assert err.count("a warning of the app") == 1
    for text in ("starting Saving", *(f"round {i} of the app" for i in range(1, 5))):
        assert text not in err
        assert (tmp_path / "run" / LOG).read_text().count(text) == 1
    jobs = json.loads((tmp_path / "run" / "summary.json").read_text())["jobs"]
    trained = [line for line in printed.splitlines() if line.startswith("training ")]
    assert len(trained) == jobs["reported"], "the client that is checked runs twice"
    if log == "json":
        assert json.loads(out)["reason"] == "4 rounds of the app"
    else:
        assert " finished (4 rounds of the app) after " in out


def test_an_app_that_configures_logging_gets_its_lines_once(tmp_path, fleet, capsys):
    app = write_app(tmp_path / "app", "own_start")
    source = (app / "own_start.py").read_text(encoding="utf-8")
    configured = "logging.basicConfig(level='INFO', format='own: %(message)s')\n\nclient, server"
    source = source.replace("client, server", configured, 1)
    (app / "own_start.py").write_text(source, encoding="utf-8")
    command = ["simulate", app, "--traces", fleet, "--out", tmp_path / "run"]
    code, _, err = invoked(command, capsys)
    assert code == 0
    assert err.count("own: a warning of the app") == err.count("a warning of the app") == 1
    assert "starting Saving" not in err, "neither by Flower's handler nor by that of the app"
