"""What formats cost a core and its memory, and whether messages are as long as they are said to be.

- Speed: 25 million float32 are encoded and decoded, in GB of float32 a processor second.
- Memory: the peak beyond what comes in and goes out.
- Bytes: of replies, by shapes alone, as a simulation charges them, and as Flower serialises them,
  with all arrays packed as one and each apart.

Run it with: python benchmarks/messages/codec.py [--quick]
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from threadpoolctl import threadpool_limits

from fedstale.flower import size_of
from fedstale.strategies.messages.codec import (
    FORMATS,
    FormatName,
    decode,
    encode,
    is_quantised,
    n_bytes,
)
from fedstale.strategies.messages.records import coarse
from fedstale.strategies.server.packing import pack
from fedstale.strategies.types import Array, Model

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import write_result

N, REPEATS = 25_000_000, 7
NETWORKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "64-32-10": ((32, 64), (32,), (10, 32), (10,)),
    "14 MB in 100 arrays": ((265, 264),) * 50 + ((264,),) * 50,
    "100 MB in 160 arrays": ((560, 558),) * 80 + ((560,),) * 80,
}
"""Shapes of their arrays; the first is the network of `digits`."""
Row = dict[str, object]
Work = Callable[[], object]


def speeds(n: int, repeats: int) -> list[Row]:
    """Return how fast each format is written, with error feedback and without, and read."""
    rng = np.random.default_rng(0)
    x, base, left = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    rows: list[Row] = []
    for form in FORMATS:
        made = encode(x, form)
        read: dict[str, Work] = {"decode": partial(decode, made, form, x.shape, x.dtype)}
        written: dict[str, Work] = {
            "encode": partial(encode, x, form),
            "encode, error feedback": partial(encode, x, form, minus=base, left=left),
        }
        rows += _timed(written | read, n, repeats, form=form)
    return rows


def _timed(works: dict[str, Work], n: int, repeats: int, *, form: FormatName) -> Iterator[Row]:
    """Yield the GB of float32 a processor second of each work."""
    for name, work in works.items():
        work()  # what is made once is made
        found = [np.dtype(np.float32).itemsize * n / 1e9 / _took(work) for _ in range(repeats)]
        speed = {"gb_per_s": float(np.median(found)), "min": min(found), "max": max(found)}
        row: Row = {"what": "speed", "format": form, "work": name, "parameters": n}
        row |= {k: round(v, 2) for k, v in speed.items()} | {"repeats": repeats}
        print(row, flush=True)
        yield row


def _took(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def memory(n: int) -> list[Row]:
    """Return the bytes that are taken on the way, beyond arguments and result."""
    x, base, left = (np.ones(n, np.float32) for _ in range(3))
    rows: list[Row] = []
    for form in FORMATS:
        made = encode(x, form, minus=base, left=left)
        decode(made, form, x.shape, x.dtype)  # what is made once is made
        up = _peak(partial(encode, x, form, minus=base, left=left)) - len(made)
        down = _peak(partial(decode, made, form, x.shape, x.dtype)) - x.nbytes
        rows.append(
            {
                "what": "memory",
                "format": form,
                "parameters": n,
                "encode_bytes": up,
                "decode_bytes": down,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sizes() -> list[Row]:
    """Return the bytes of replies as they are predicted, charged and serialised."""
    rows: list[Row] = []
    for name, shapes in NETWORKS.items():
        model = {f"layer.{i}": _drawn(shape, i) for i, shape in enumerate(shapes)}
        for form in (None, *FORMATS):
            reply = _reply(model, form)
            charged = sum(size_of(reply))
            packed = _serialised(make_message(reply.metadata, pack(reply.content)))
            apart = _serialised(reply)
            rows.append(
                {
                    "what": "bytes",
                    "network": name,
                    "format": form or "in full",
                    "by_shapes": _by_shapes(model, form),
                    "charged": charged,
                    "packed": packed,
                    "packed_off": round(charged / packed - 1, 4),
                    "apart": apart,
                    "apart_off": round(charged / apart - 1, 4),
                }
            )
            print(rows[-1], flush=True)
    return rows


def _serialised(message: Message) -> int:
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def _drawn(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _reply(model: Model, form: FormatName | None) -> Message:
    arrays = ArrayRecord({name: FlowerArray(x) for name, x in model.items()})
    arrays = arrays if form is None else coarse(arrays, form)
    metrics = MetricRecord({"num-examples": 10, "train_loss": 0.5})
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    about = Metadata(1, "", 1000, 1, "asked", "", 0.0, 60.0, "train")
    return make_message(about, content)


def _by_shapes(model: Model, form: FormatName | None) -> int:
    return sum(
        n_bytes(form, x.size)
        if form is not None and is_quantised(form, x.dtype, x.shape)
        else x.nbytes
        for x in model.values()
    )


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two million numbers")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with threadpool_limits(1):
        n, repeats = (2_000_000, 2) if is_quick else (N, REPEATS)
        rows = [*speeds(n, repeats), *memory(n), *sizes()]
    command = "python benchmarks/messages/codec.py"
    print(write_result("compact_codec", rows, command=command, quick=is_quick))


if __name__ == "__main__":
    main()
