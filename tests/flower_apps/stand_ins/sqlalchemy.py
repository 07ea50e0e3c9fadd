"""An engine whose database is a table of made-up measurements in memory."""

import sqlite3

import numpy as np

__version__ = "2.0.45"

_COLUMNS = ("age", "bmi", "systolic_bp", "diastolic_bp", "ldl_cholesterol", "hba1c")


class Engine(sqlite3.Connection):
    def dispose(self):
        self.close()


def create_engine(url):
    engine = sqlite3.connect(":memory:", factory=Engine)
    engine.execute(f"CREATE TABLE person_measurements ({', '.join(_COLUMNS)})")
    rows = np.random.default_rng(0).uniform(20.0, 90.0, (50, len(_COLUMNS))).tolist()
    marks = ", ".join("?" * len(_COLUMNS))
    engine.executemany(f"INSERT INTO person_measurements VALUES ({marks})", rows)
    return engine
