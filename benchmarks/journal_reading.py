"""What reading the recorder's journal costs a device that forecasts: time and memory a message.

A device reads when a message comes, mostly in a process that has read nothing before. Journals of
7 and 28 days, at 5 and 60 s between readings, are filled with a phone that is free at night and for
some minutes now and then, under a load that changes with each reading. Memory is the peak of the
process, from /proc: Linux only.

Run it with: OMP_NUM_THREADS=1 python benchmarks/journal_reading.py [--no-write]
"""

import json
import sqlite3
import subprocess
import sys
import time
import zlib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from results_file import write_result

from fedstale.client import FORECAST_RECORD, QUERY, ForecastMod
from fedstale.traces.recording.journal import RECORD, Journal, RecordingRun, files_of
from fedstale.traces.recording.monitor import Reading

DAY_S = 86_400.0
REPEATS = 3


def fill(folder: Path, days: int, interval_s: float) -> None:
    """Write a journal that ends now, as formats.md describes it."""
    n = round(days * DAY_S / interval_s)
    rng = np.random.default_rng(0)
    readings = np.zeros(n, dtype=RECORD)
    readings["steady"] = interval_s * np.arange(n)
    readings["instant"] = time.time() - interval_s * np.arange(n)[::-1]
    hour = readings["instant"] % DAY_S / 3600.0
    some = rng.random(round(days * 24 * 6)) < 0.2
    now_and_then = some[np.minimum(readings["steady"] // 600.0, some.size - 1).astype(int)]
    readings["online"] = readings["charging"] = (hour < 6) | now_and_then
    readings["processor_left"] = rng.random(n)
    about = RecordingRun(device_id="phone", interval_s=interval_s, utc_offset_s=0.0)
    with Journal(folder, about, max_bytes=10**9) as journal:
        journal.append(Reading(instant=float(readings["instant"][0])), 0.0)

    def rows() -> "list[tuple[int, int, bytes, int]]":
        keys = ((k + 1, 0, readings[k].tobytes()) for k in range(1, n))
        return [(*key, zlib.crc32(repr(key).encode())) for key in keys]

    with closing(sqlite3.connect(files_of(folder)[0])) as database, database:
        database.executemany("INSERT INTO readings VALUES (?, ?, ?, ?)", rows())


def megabytes(name: str) -> float:
    """Return a number of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def answer(mod: ForecastMod, here: Context) -> None:
    """Ask a device for a forecast."""
    request = make_message(Metadata(1, "m", 1, 7, "", "", time.time(), 3600.0, QUERY), RecordDict())

    def app(message: Message, _: Context) -> Message:
        raise AssertionError(message)

    assert "error" not in mod(request, here, app).content[FORECAST_RECORD]


def measure(folder: Path) -> dict[str, float]:
    """Return CPU times and memory of messages in this process, which has read nothing yet."""
    plain, here = ForecastMod(), Context(1, 7, {}, RecordDict(), {})
    # With the imports and the forecaster.
    answer(plain, here)
    began = time.process_time()
    answer(plain, here)
    without, before = time.process_time() - began, megabytes("VmRSS")
    mod, spans = ForecastMod(journal=folder, available="charging"), []
    for _ in range(REPEATS):
        began = time.process_time()
        answer(mod, here)
        spans.append(time.process_time() - began)
    assert "fedstale.journal" in here.state, "the journal was read"
    return {
        "first_message_s": spans[0] - without,
        "later_message_s": min(spans[1:]) - without,
        "megabytes": megabytes("VmHWM") - before,
    }


def main() -> None:
    """Measure each journal in processes of its own, print, and write the result."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
        return
    rows: list[dict[str, object]] = []
    for days in (7, 28):
        for interval_s in (5.0, 60.0):
            with TemporaryDirectory() as parent:
                folder = Path(parent) / "phone.parquet.journal"
                fill(folder, days, interval_s)
                command = [sys.executable, __file__, "--measure", str(folder)]
                found = [
                    json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
                    for _ in range(REPEATS)
                ]
                size = sum(file.stat().st_size for file in folder.iterdir())
            best = {key: min(each[key] for each in found) for key in found[0]}
            rows.append({"days": days, "interval_s": interval_s, "journal_mb": size / 1e6, **best})
    for row in rows:
        print(", ".join(f"{k} {v:.3g}" for k, v in row.items()))
    if "--no-write" not in sys.argv:
        write_result(
            "journal_reading",
            rows,
            command="OMP_NUM_THREADS=1 python benchmarks/journal_reading.py",
        )


if __name__ == "__main__":
    main()
