"""`fedstale estimate`: say what a run would take, without running it."""

from typing import Annotated

import typer

from fedstale.cli.output import App, AsJson, note, one_sentence, say_json

app = typer.Typer()
_OWN = ("alpha", "round-timeout")


@app.command(
    rich_help_panel="Analyse",
    epilog="Example: fedstale estimate digits --strategy 'FedBuff(20, 5)' --rounds 10",
)
@one_sentence()
def estimate(
    name: App,
    strategy: Annotated[str, typer.Option(help="Such as 'FedBuff(20, 5)' or 'FedAvg(20)'.")],
    rounds: Annotated[float, typer.Option(help="That 'FedAvg(10)' takes on ideal:N.")],
    traces: Annotated[str, typer.Option(help="As for simulate.")] = "synthetic:100",
    config: Annotated[str, typer.Option("-c", help="The app's run config, as for simulate.")] = "",
    as_json: AsJson = False,
) -> None:
    """Say what a run takes on devices, without running it.

    An emulator has learnt it from short simulations: docs/contrib/emulator.md says how well.
    """
    from fedstale.contrib.emulator.emulator import estimate as estimated
    from fedstale.errors import ConfigError
    from fedstale.simulation import FlowerApp, missing_costs, overrides_in
    from fedstale.traces import TraceSet

    own, given = FlowerApp.find(name), overrides_in([config], "run-config")
    keys = own.run_config({k: v for k, v in given.items() if k not in _OWN}) | given
    costs = own.costs.resolved(keys)
    missing = [*missing_costs(["train"], costs), *["model-bytes"] * (costs.model_bytes is None)]
    if missing := [*missing, *(key for key in _OWN if key not in keys)]:
        raise ConfigError(
            f"app = {name!r}: what a job is, is not known: {', '.join(missing)} missing; expected "
            "in [tool.fedstale] of the app, and alpha and round-timeout by -c 'KEY=...'"
        )
    each, epochs, examples = costs.work_per_example, costs.epochs, costs.examples
    work = float(each or 0.0) * float(epochs or 0.0) * float(examples or 0.0)
    found = estimated(
        TraceSet.load(traces, seed=0),
        strategy,
        rounds=rounds,
        work=costs.work.get("train", work),
        message_bytes=float(costs.model_bytes or 0),
        timeout_s=float(keys["round-timeout"]),
        skew=float(keys["alpha"]),
    )
    if as_json:
        say_json(None, spans=found.spans, outside=found.outside)
        return
    for what, (low, middle, high) in found.spans.items():
        typer.echo(f"{what}: {middle:.3g}, from {low:.3g} to {high:.3g}")
    for said in found.outside:
        note(f"fedstale: beyond what was learnt from, the ends mean nothing: {said}")
