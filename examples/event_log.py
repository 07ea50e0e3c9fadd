"""Write what happens in a run while it happens, a JSON object a line."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from flwr.app import ArrayRecord, Message

import fedstale
from fedstale.strategies import Callback, Runtime
from fedstale.strategies.types import ClientUpdate


class EventLog(Callback):
    """Writes each event with its instant in s; the same settings and seed write the same bytes."""

    def __init__(self, path: str) -> None:
        """Write to a file, in the place of what is there."""
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - for the run

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Write that a node was sent something."""
        about = message.metadata
        facts = {"node": about.dst_node_id, "message_type": about.message_type}
        self._write(run, "sent", job=message_id, **facts)

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Write what came back, with its status as in events.parquet."""
        node = reply.metadata.src_node_id
        self._write(run, "reply", job=message_id, node=node, status=status)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Write why a reply was not used."""
        self._write(run, "rejected", job=message_id, reason=reason)

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Write that there is a new model, and which updates went into it."""
        for update in updates:
            facts = {"node": update.node_id, "staleness": update.staleness}
            self._write(run, "aggregated", version=version, **facts)
        self._write(run, "version", version=version)

    def metrics(self, run: Runtime, version: int, source: str, values: Mapping[str, float]) -> None:
        """Write metrics; JSON has no NaN."""
        plain = {name: value if isfinite(value) else None for name, value in values.items()}
        self._write(run, "metrics", version=version, source=source, values=plain)

    def ended(self, run: Runtime, status: str, reason: str) -> None:
        """Write how the run ended; it is the last line."""
        self._write(run, "ended", status=status, reason=reason)
        self._file.close()

    def _write(self, run: Runtime, event: str, **facts: object) -> None:
        self._file.write(json.dumps({"at_s": run.now(), "event": event, **facts}) + "\n")
        self._file.flush()


run = fedstale.simulate(
    "digits",
    traces="synthetic:60",
    until="30m",
    seed=1,
    run_config={"strategy": "FedBuff(10, 5)"},
    callbacks=[EventLog("watched.jsonl")],
)
events = [json.loads(line) for line in Path("watched.jsonl").read_text().splitlines()]
for event, n in Counter(each["event"] for each in events).items():
    print(f"{event}: {n}")
