"""Flower's messages and records, and the simulator's jobs, as arrays and plain values.

A checkpoint of a simulation holds them, so that a run goes on from it as if it had never stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedstale.simulation.compat import with_content
from fedstale.simulation.flight import Flight
from fedstale.traces import Status

State = dict[str, Any]

_EMPTY = RecordDict()
_OWN = {"message", "asked", "outcome", "failure"}
_KINDS: Mapping[object, Any] = {float: np.float64, int: np.int64}


def records_out(content: RecordDict) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return records as bytes."""
    return np.frombuffer(recorddict_to_proto(content).SerializeToString(), dtype=np.uint8)


def records_in(data: np.ndarray[Any, np.dtype[np.uint8]]) -> RecordDict:
    """Return what `records_out` was given."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data.tobytes()))


def flights_out(flights: Sequence[Flight]) -> State:
    """Return jobs, those with a message with it; messages with the same records share them."""
    columns: State = {}
    for f in fields(Flight):
        if f.name in _OWN:
            continue
        values = [getattr(flight, f.name) for flight in flights]
        kind = _KINDS.get(f.type)
        columns[f.name] = _words_out(values) if kind is None else np.array(values, dtype=kind)
    contents: dict[int, tuple[int, RecordDict]] = {}
    messages: State = {}
    for flight in flights:
        if flight.message is not None:
            content = flight.message.content
            number, _ = contents.setdefault(id(content), (len(contents), content))
            head = message_to_proto(with_content(flight.message, _EMPTY)).SerializeToString()
            messages[str(flight.job_id)] = [np.frombuffer(head, dtype=np.uint8), number]
    return {
        "columns": columns,
        "asked": np.array([flight.asked for flight in flights]).reshape(-1, 5),
        "outcome": np.array([int(flight.outcome) for flight in flights], dtype=np.int8),
        "failures": {str(f.job_id): list(f.failure) for f in flights if f.failure is not None},
        "messages": messages,
        "contents": [records_out(content) for _, content in contents.values()],
    }


def flights_in(state: State) -> list[Flight]:
    """Return what `flights_out` was given."""
    contents = [records_in(data) for data in state["contents"]]
    messages = {
        int(job): with_content(
            message_from_proto(ProtoMessage.FromString(head.tobytes())), contents[number]
        )
        for job, (head, number) in state["messages"].items()
    }
    failures = {int(job): (int(code), why) for job, (code, why) in state["failures"].items()}
    columns: dict[str, list[Any]] = {
        name: _words_in(values) if isinstance(values, dict) else values.tolist()
        for name, values in state["columns"].items()
    }
    return [
        Flight(
            message=messages.get(columns["job_id"][i]),
            asked=tuple(asked),
            outcome=Status(int(state["outcome"][i])),
            failure=failures.get(columns["job_id"][i]),
            **{name: values[i] for name, values in columns.items()},
        )
        for i, asked in enumerate(state["asked"].tolist())
    ]


def _words_out(values: list[str]) -> State:
    """Few words occur many times: number them."""
    words = {word: i for i, word in enumerate(dict.fromkeys(values))}
    return {"words": list(words), "of": np.array([words[v] for v in values], dtype=np.int32)}


def _words_in(state: State) -> list[str]:
    return [state["words"][i] for i in state["of"].tolist()]
