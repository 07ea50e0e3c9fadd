"""What a record that others can check costs a run: processor time with it over that without.

The same run is simulated with and without a record in turns, in one process, and the ratio is of
the two of a pair. Another processor's noise is larger than that, so the calls that write the record
are timed from within as well, in a further run. One app trains digits; the other returns the model
that it was sent, which no real app does: what is left is fedstale's own work for a job. Clients run
in this process.

Run it with: python benchmarks/record.py [--devices 1000] [--pairs 5] [--quick]; it rewrites the
table of docs/record.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pages import refilled, rewrite
from results_file import read_result, write_result

import fedstale
from fedstale.reports.run import Run
from fedstale.strategies import AuditRecord, FedBuff
from fedstale.strategies.selection import ExpectedUtility, Oort, Random, Selector
from fedstale.traces import TraceSet

PAGE = Path(__file__).parent.parent / "docs" / "record.md"
NAME = "record"
Simulate = Callable[[Path, bool], Run]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of it, not written")
    options = parser.parse_args()
    traces = TraceSet.load(f"synthetic:{options.devices}@desktops", seed=0)
    pairs = 2 if options.quick else options.pairs
    rounds = 10 if options.quick else 150
    rows = [
        {"app": name, "devices": options.devices, **measured(simulate, pairs)}
        for name, simulate in apps(traces, rounds).items()
    ]
    for row in rows:
        print(row)
    if not options.quick:
        command = f"python benchmarks/record.py --devices {options.devices} --pairs {pairs}"
        write_result(NAME, rows, command=command)
        rewrite(written())


def written() -> dict[Path, str]:
    """Return the page with the table of the results that are kept."""
    return refilled([PAGE], {"cost": table(read_result(NAME)["rows"])})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table."""
    head = (
        "| app | a job without, us | the record, us a job | share | in pairs: median, least, most "
        "| bytes a job | verifying, us a job |\n|---|---:|---:|---:|---|---:|---:|"
    )
    lines = []
    for row in rows:
        without = 1e6 * row["processor_s_without"] / row["jobs"]
        verifying = 1e6 * row["verified_in_processor_s"] / row["jobs"]
        pairs = [row[f"more_percent{which}"] for which in ("", "_least", "_most")]
        lines.append(
            f"| {row['app']} | {without:,.0f} | {row['within_us_per_job']:.0f} "
            f"| {row['within_percent']:.2f} % | {', '.join(f'{p:+.1f} %' for p in pairs)} "
            f"| {row['bytes_per_job']} | {verifying:.0f} |"
        )
    return "\n".join([head, *lines])


def apps(traces: TraceSet, rounds: int) -> dict[str, Simulate]:
    """Return what simulates each app, into a folder, with a record or without."""

    def empty(selector: Selector) -> Simulate:
        return lambda out, has_record: fedstale.simulate(
            returning(),
            strategy=FedBuff(
                100, 10, selector=selector, stages=[AuditRecord()] if has_record else []
            ),
            initial_arrays={"w": np.zeros(1000, np.float32)},
            traces=traces,
            until=f"{rounds} rounds",
            out=out,
            work_per_example=1.0,
            epochs=1,
            examples=60,
            model_bytes=1_000_000,
            executor="inline",
        )

    def digits(out: Path, has_record: bool) -> Run:
        config = {
            **{"strategy": "fedbuff", "concurrency": 100, "buffer-size": 10, "forecasts": True},
            **{"num-server-rounds": 999, "record": has_record},
        }
        return fedstale.simulate(
            "digits",
            traces=traces,
            until=f"{rounds // 5} rounds",
            out=out,
            run_config=config,
            executor="inline",
        )

    return {
        "digits, with forecasts": digits,
        "returns its model, Random": empty(Random()),
        "returns its model, ExpectedUtility": empty(ExpectedUtility()),
        "returns its model, Oort": empty(Oort()),
    }


def returning() -> ClientApp:
    """Return a client that trains nothing."""
    app = ClientApp()
    metrics = MetricRecord({"train_loss": 1.0, "num-examples": 60})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy())})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


@contextmanager
def timed() -> Iterator[list[float]]:
    """Add up the processor seconds of the calls that write a record; also what timing takes."""
    total, names = [0.0], ["begin", "end", "picked", "sent", "incoming", "ended", "left_out"]
    names += ["state_dict"]
    before = {name: getattr(AuditRecord, name) for name in names}

    def with_time(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*values: object, **named: object) -> object:
            began = time.thread_time()
            try:
                return call(*values, **named)
            finally:
                total[0] += time.thread_time() - began

        return wrapped

    for name, call in before.items():
        setattr(AuditRecord, name, with_time(call))
    try:
        yield total
    finally:
        for name, call in before.items():
            setattr(AuditRecord, name, call)


def measured(simulate: Simulate, pairs: int) -> dict[str, float | int]:
    """Return the medians over pairs; which of the two comes first alternates."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with TemporaryDirectory() as folder:
        simulate(Path(folder) / "first", True)
        for i in range(pairs):
            for has_record in (True, False) if i % 2 else (False, True):
                out = Path(folder) / f"{i}-{has_record}"
                began = time.process_time()
                run = simulate(out, has_record)
                seconds[has_record].append(time.process_time() - began)
                if has_record:
                    recorded = run
        with timed() as within:
            began = time.process_time()
            simulate(Path(folder) / "timed", True)
            timed_s = time.process_time() - began
        record = recorded.folder / "record.jsonl"
        jobs = int(recorded.summary["jobs"]["sent"])
        began = time.process_time()
        found = fedstale.verify(recorded)
        verified_s = time.process_time() - began
        assert found.holds
        assert found.made_again == found.picks
        n_bytes = record.stat().st_size
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    more = [on - off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "jobs": jobs,
        "lines": found.lines,
        "processor_s_without": round(statistics.median(seconds[False]), 3),
        "processor_s_with": round(statistics.median(seconds[True]), 3),
        "more_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "more_percent_least": round(100 * (min(ratios) - 1), 2),
        "more_percent_most": round(100 * (max(ratios) - 1), 2),
        "more_us_per_job": round(1e6 * statistics.median(more) / jobs, 1),
        "within_percent": round(100 * within[0] / timed_s, 2),
        "within_us_per_job": round(1e6 * within[0] / jobs, 1),
        "bytes_per_job": round(n_bytes / jobs),
        "verified_in_processor_s": round(verified_s, 3),
        "pairs": pairs,
    }


if __name__ == "__main__":
    main()
