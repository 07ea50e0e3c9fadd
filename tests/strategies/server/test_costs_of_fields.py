"""What a server spends for each byte of a reply: time and memory, for each kind of field.

All limits of validation are raised, so that everything is read.
"""

import gc
import json
import struct
import time
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from replies import BASE, job, reply

from fedstale.errors import ProtocolError
from fedstale.flower import bytes_of_records, content_size
from fedstale.flower.superlink_grid import Objects
from fedstale.simulation import Costs
from fedstale.simulation.costs import CostModel
from fedstale.simulation.metrics import MessageRounds, RunMetrics
from fedstale.strategies import OlderClients, Validation
from fedstale.strategies.server.checks import Checks
from fedstale.strategies.server.packing import PACKED_RECORD, PACKING_RECORD, PackedNodes
from fedstale.strategies.server.runtime import Runtime, WallClock
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.stages import StepsDone
from fedstale.strategies.types import forecast_in
from fedstale.until import Until

pytestmark = pytest.mark.usefixtures("_identity")

MOST = 2**40
ALL = Validation(
    most_records=MOST, most_metrics=MOST, most_elements=MOST, most_names=MOST, strikes=MOST
)
NAN = float("nan")


def metrics(**values):
    return {"metrics": MetricRecord({"num-examples": 3, **values})}


def config(name="c", **values):
    return {name: ConfigRecord(values)}


def arrays(**found):
    return {"arrays": ArrayRecord(found)}


def stored(header, n_bytes=8):
    """Bytes in NumPy's format with a header of any text."""
    head = header.encode().ljust(1000) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(n_bytes)


def headed(shape, descr="'<f8'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return Array("float64", (1,), "numpy.ndarray", stored(text))


def headers(array, n):
    return arrays(**{f"a{k}": array for k in range(n // 1000)})


def packed(n, **about):
    """A packed reply of arrays of a byte; what packing says of them may be another."""
    names = [f"a{k}" for k in range(n)]
    said = {"version": 2, "records": ["arrays"], "counts": [n], "names": names}
    said |= {"sizes": [1] * n, "forms": ["1,;uint8;numpy.ndarray"] * n, "checksum": 0, **about}
    flat = Array(np.zeros(n, np.uint8))
    return {PACKED_RECORD: ArrayRecord({"flat": flat}), PACKING_RECORD: ConfigRecord(said)}


def older(**values):
    status = ConfigRecord({"code": 0, "message": "ok", **values})
    return {"fitres.status": status, "fitres.num_examples": MetricRecord({"num_examples": 3})}


FIELDS = {
    "records": lambda n: {f"r{k}": ConfigRecord() for k in range(n // 25)},
    "metrics": lambda n: metrics(**{f"m{k}": 0.5 for k in range(n // 10)}),
    "metrics that are no numbers": lambda n: metrics(**{f"m{k}": NAN for k in range(n // 10)}),
    "lists of metrics": lambda n: metrics(many=[0.5] * (n // 8)),
    "lists that are no numbers": lambda n: metrics(many=[NAN] * (n // 8)),
    "many lists": lambda n: metrics(**{f"m{k}": [NAN, 1.0] for k in range(n // 40)}),
    "names": lambda n: metrics(**{"m" * n: 0.5}),
    "names of lists that are no numbers": lambda n: metrics(**{"m" * n: [NAN] * 100}),
    "names of lists": lambda n: metrics(**{"m" * n: [0.5] * 100}),
    "names of records": lambda n: {"r" * n: MetricRecord({"m": NAN})},
    "texts": lambda n: config(text="\n\x1b[31m" * (n // 6)),
    "bytes": lambda n: config(data=bytes(n)),
    "lists of texts": lambda n: config(texts=["\n" * 10] * (n // 10)),
    "arrays": lambda n: arrays(**{f"a{k}": Array(np.zeros(1)) for k in range(n // 100)}),
    "bytes of arrays": lambda n: arrays(w=Array(np.zeros(n // 4, np.float32))),
    "axes of arrays": lambda n: arrays(w=Array("float32", (1,) * (n // 8), "numpy.ndarray", b"x")),
    "dtypes": lambda n: arrays(w=Array("f" * n, (2, 3), "numpy.ndarray", b"x")),
    "kinds of arrays": lambda n: arrays(w=Array("float32", (2, 3), "s;" * (n // 2), b"x")),
    "headers of many axes": lambda n: headers(headed("(" + "1, " * 300 + ")"), n),
    "headers of long numbers": lambda n: headers(headed("(" + "9" * 900 + ",)"), n),
    "headers of signs": lambda n: headers(headed("(" + "-" * 900 + "1,)"), n),
    "headers in brackets": lambda n: headers(headed("(" * 450 + ")" * 450), n),
    "headers of many fields": lambda n: headers(headed("()", "'" + "b," * 450 + "b'"), n),
    "headers of spaces": lambda n: headers(headed("(2," + " " * 900 + "3)"), n),
    "int8": lambda n: arrays(w=Array("float32", (n,), "fedstale.int8", bytes(n))),
    "packed arrays": lambda n: packed(n // 30),
    "packed forms": lambda n: packed(n // 1000, forms=["1," * 400 + ";;"] * (n // 1000)),
    "packed forms that do not end": lambda n: packed(1, forms=["1," * (n // 2)]),
    "packed names": lambda n: packed(2, names=["n" * (n // 2)] * 2),
    "packed sizes": lambda n: packed(2, sizes=[1] * (n // 8)),
    "forecasts": lambda n: config("fedstale.forecast", **{f"f{k}": 0.5 for k in range(n // 10)}),
    "lists of forecasts": lambda n: config("fedstale.forecast", levels=[0.5] * (n // 8)),
    "errors of forecasts": lambda n: config("fedstale.forecast", error="no\n" * (n // 3)),
    "steps": lambda n: config("fedstale.work", steps=[1] * (n // 8), done="x" * n),
    "statuses of older clients": lambda n: older(code=1, message="\x1b" * n),
    "metrics of older clients": lambda n: (
        older() | config("fitres.metrics", **{f"m{k}": NAN for k in range(n // 15)})
    ),
}


class Server:
    """All that reads a reply on a server or in a simulation."""

    def __init__(self):
        self.run = Runtime(WallClock(), MessageRounds(), RunMetrics(Until()))
        self.costs = CostModel(Costs(work_per_example=1.0, epochs=1, examples=10))
        self.versions = Versions(BASE)

    def read(self, body):
        checks, message = Checks(ALL), reply(RecordDict(body))
        message = PackedNodes().unpacked(message)
        if not message.has_error():
            size = content_size(message.content)
            self.costs.learn("train", 7, message, size, 9, 0.5)
            StepsDone.of(message.content)
            forecast_in(message.content)
        self.run.reply("m", message, "reported")
        if message.has_error():
            return
        for reading in (
            lambda: OlderClients().incoming(job(), message.content),
            lambda: checks.measurements(message, node_id=7),
            lambda: checks.open(message, job(), self.versions),
        ):
            try:
                reading()
            except ProtocolError as problem:
                checks.reject(7, problem, 0.0)


@pytest.fixture(autouse=True)
def _no_collection():
    """Let no collection of garbage fall into what is measured: it looks at all of the process."""
    gc.disable()
    yield
    gc.enable()


def least_s(server, body):
    """The CPU time of reading in s, of several times the least."""
    found = []
    for _ in range(3):
        copy = RecordDict(dict(body))
        began = time.process_time()
        server.read(copy)
        found.append(time.process_time() - began)
    return min(found)


def peak_bytes(server, body):
    tracemalloc.start()
    try:
        server.read(RecordDict(dict(body)))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", FIELDS)
def test_ten_times_the_bytes_take_ten_times_the_time_and_a_few_times_their_memory(field):
    server, n = Server(), 50_000
    small, large = FIELDS[field](n), FIELDS[field](10 * n)
    server.read(RecordDict(dict(small)))
    n_bytes = len(bytes_of_records(RecordDict(large)))
    assert n_bytes > 60_000
    # What is shorter than that is measured by chance, and hurts nobody.
    assert any(
        least_s(server, large) <= max(15 * least_s(server, small), 0.05) for _ in range(5)
    ), field
    assert peak_bytes(server, large) <= 15 * n_bytes + 200_000


@pytest.mark.parametrize("n_chunks", [1, 100])
def test_the_size_of_a_reply_is_read_off_its_objects_in_a_time_that_grows_as_they_do(n_chunks):
    def seconds(n):
        ids = ",".join(f"{k:064x}" for k in range(n_chunks * n // 5000))
        body = json.dumps({"arraychunk_ids": [0] * (n // 3)}).encode()
        content = f"Array {ids} {len(body)}".encode() + b"\0" + body
        found = []
        for _ in range(3):
            objects = Objects(read=lambda object_id: b"ArrayChunk x")
            objects.note("a", content)
            began = time.process_time()
            assert objects.size("a") == 12 * (n // 3)
            found.append(time.process_time() - began)
        return min(found)

    assert any(seconds(300_000) <= max(15 * seconds(30_000), 0.05) for _ in range(5))
