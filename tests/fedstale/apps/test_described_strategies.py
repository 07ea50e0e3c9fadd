"""The strategies that a run config describes: each that there is runs, also by the command."""

import numpy as np
import pytest
import tomli_w
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny import COSTS
from typer.testing import CliRunner

import fedstale
from fedstale.apps.strategy import check, strategy
from fedstale.cli.main import app as command
from fedstale.compat import stock_strategies_reporting
from fedstale.errors import ConfigError
from fedstale.simulation import TraceGrid
from fedstale.simulation.executors import InlineExecutor
from fedstale.simulation.flower_app import FlowerApp, overrides_in
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import TraceSet

FLOWERS = "flower.FedAvg(fraction_train=0.8, fraction_evaluate=0, min_train_nodes=1)"
EVERY = [
    FLOWERS,
    *("FedAvg(fraction_train=0.8)", "FedAvgOverSelected(8)", "FedProx(10)", "FedAvgM(10)"),
    *("FedAdam(10)", "FedYogi(10)", "FedAdagrad(10)", "FedBuff(10, 8)", "FedAsync(10)"),
    *("GapAware(10, 8)", "DirectionAware(10, 8)", "REFL(10, 8)", "FADAS(10, 8)"),
    *("AsyncFedED(10)", "CA2FL(10, 8)", "FedStale(10)"),
    *(
        f"FedBuff(10, 8, selector={selector})"
        for selector in (
            *("Random()", "Fastest()", "PowerOfChoice(30)", "Oort(PAPER)", "LeastAvailable()"),
            *("MostReliable()", "ExpectedUtility()", "Probing(ExpectedUtility(), 0.2)"),
            "AgentSelector()",
        )
    ),
    *(
        f"FedBuff(10, 8, weighting={weighting})"
        for weighting in (
            *("ByAge(constant())", "ByAge(polynomial(0.3))", "ByAge(hinge())"),
            *("ByAge(staleness_aware())", "ByAge(inverse_root())"),
            *("Gap(of='layer')", "DirectionalGap()", "RelevanceAware()"),
            *("EuclideanStaleness()", "CachedUpdates(1.0)"),
        )
    ),
    *(
        f"FedBuff(10, 8, robust={rule})"
        for rule in (
            *(
                "Median(f=1)",
                "TrimmedMean(f=1)",
                "GeometricMedian(f=1)",
                "Krum(f=1)",
                "MultiKrum(f=1)",
            ),
            *("Bulyan(f=1)", "CentredClipping(f=1)", "CTMA(f=1)"),
        )
    ),
    "FedAvg(schedule=semi_synchronous(10, 60.0), server_optimizer=Yogi())",
    "FedBuff(10, 2, pace=AdaSync(8), validation=Validation(), until='2h')",
    "FedBuff(10, 2, pace=Ramp(50))",
]


def table_of(variants, traces):
    """Return a plan of variants that differ in their run config."""
    return {
        "app": "digits",
        "traces": traces,
        "seeds": [1],
        "run-config": {"num-server-rounds": 1, "local-epochs": 1},
        "variants": {name: {"run-config": parts} for name, parts in variants.items()},
    }


def loss_of(arrays, place):
    return float(sum(((w - place) ** 2).sum() for w in arrays))


def client():
    """Return a client whose devices pull the model to places of their own."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        place = 1.0 + context.node_config["partition-id"] / 12
        arrays = message.content["arrays"].to_numpy_ndarrays()
        loss = loss_of(arrays, place)
        metrics = {"train_loss": loss, "square_loss": loss**2, "num-examples": 10}
        moved = ArrayRecord([w + 0.5 * (place - w) for w in arrays])
        content = {"arrays": moved, "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


class Seen(Callback):
    """What a server measured of its models, and how jobs ended."""

    def __init__(self):
        self.losses, self.endings = [], []

    def metrics(self, run, version, source, values):
        if source == "server":
            self.losses.append(values["loss"])

    def reply(self, run, message_id, reply, status):
        self.endings.append(status)


@pytest.mark.parametrize("text", EVERY)
def test_every_strategy_and_part_runs_some_rounds(text):
    config = FlowerApp.find("digits").run_config({"strategy": text})
    grid = TraceGrid(TraceSet.ideal(12), InlineExecutor(client()), costs=COSTS, run_config=config)
    seen = Seen()
    grid.runtime.add(seen)

    def evaluate(server_round, arrays):
        return MetricRecord({"loss": loss_of(arrays.to_numpy_ndarrays(), 1.0)})

    with grid.running(), stock_strategies_reporting(grid.runtime):
        strategy(config).start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros((3, 2)), np.zeros(4, dtype=np.float32)]),
            num_rounds=3,
            timeout=3600.0,
            evaluate_fn=evaluate,
        )
    assert len(seen.losses) == len(set(seen.losses)) == 4
    assert seen.endings.count("reported") >= 3


@pytest.mark.parametrize("text", [FLOWERS, "FedBuff(10, 8, selector=AgentSelector())"])
def test_the_strategy_of_a_built_in_app_is_the_one_that_is_described(text, tmp_path):
    run = fedstale.simulate(
        "digits",
        traces=TraceSet.ideal(12),
        run_config={"strategy": text, "local-epochs": 1, "num-server-rounds": 3},
        executor="inline",
        out=tmp_path / "run",
    )
    assert run.status == "finished", run.reason
    assert run.summary["rounds"] == 3
    losses = run.curve("loss", "server")[1]
    assert len(set(losses.tolist())) == 4
    assert (run.jobs["status"] == "reported").sum() >= 3


def called(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("seed='one'", "seed = 'one': expected a whole number"),
        ("checkpoints='x'", "flower.FedAvg has no checkpoints: expected a strategy of fedstale's"),
        (
            "strategy='FedBuff(9, stages=[ForecastRequest()])'",
            "forecasts = false: expected true, which ForecastRequest(",
        ),
        (
            "strategy='FedBuff(9, stages=[LocalWork(within_s=60)])'",
            "forecasts = false: expected true, which LocalWork(",
        ),
        (
            "strategy='FedAsync(9, robust=Krum(f=1))'",
            "strategy.schedule.buffer_size = 1: expected at least 3 for Krum(f=1)",
        ),
        (
            "strategy=\"FedBuff(9, robust=Median(f=1), normalise='steps')\"",
            "strategy.normalise = 'steps': expected another one with a robust rule",
        ),
        (
            "strategy='FedAvg(stages=[Privacy(delta=0.5, clip_norm=1, noise_multiplier=1)])'",
            "strategy.normalise = 'examples': expected 'buffer_size' with Privacy",
        ),
    ],
)
def test_what_a_run_config_cannot_have_is_one_sentence(settings, sentence):
    config = FlowerApp.find("digits").run_config(overrides_in([settings], "run-config"))
    with pytest.raises(ConfigError) as refused:
        strategy(config)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_check_needs_none_of_the_folders_that_the_run_has():
    config = FlowerApp.find("digits").run_config({"resume": "nowhere", "checkpoints": "nowhere"})
    check({**config, "strategy": "FedBuff(9)"})


def test_the_command_line_says_the_sentence_and_no_more(tmp_path):
    run = called(
        *("simulate", "digits", "--traces", "ideal:5", "--out", tmp_path / "run"),
        *("-c", "strategy='GapAwares(9)'"),
    )
    assert run.exit_code != 0
    assert run.stderr.count("\n") == 1
    assert "'GapAwares' is unknown: expected 'GapAware'" in run.stderr
    assert "Traceback" not in run.output


def test_a_plan_with_a_wrong_strategy_is_refused_before_anything_runs(tmp_path):
    wrong = {"strategy": "FedBuff(9, robust=Crum(1))"}
    table = table_of({"one": wrong}, traces="ideal:12")
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(table))
    run = called("compare", tmp_path / "plan.toml", "--out", tmp_path / "out")
    assert run.exit_code == 2
    assert "'Crum' is unknown: expected 'Krum'" in run.stderr
    assert not (tmp_path / "out").exists()
