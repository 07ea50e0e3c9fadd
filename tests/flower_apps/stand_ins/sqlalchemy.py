"""SQLAlchemy itself, but that each database is a table of made-up measurements in memory."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np

_HERE = Path(__file__).parent
_COLUMNS = ("age", "bmi", "systolic_bp", "diastolic_bp", "ldl_cholesterol", "hba1c")

_elsewhere = [folder for folder in sys.path if Path(folder).resolve() != _HERE]
_spec = PathFinder.find_spec("sqlalchemy", _elsewhere)
_sqlalchemy = module_from_spec(_spec)
sys.modules["sqlalchemy"] = _sqlalchemy
_spec.loader.exec_module(_sqlalchemy)
_create_engine = _sqlalchemy.create_engine


def create_engine(url):
    engine = _create_engine("sqlite://")
    rows = np.random.default_rng(0).uniform(20.0, 90.0, (50, len(_COLUMNS))).tolist()
    names = ", ".join(_COLUMNS)
    marks = ", ".join("?" * len(_COLUMNS))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE TABLE person_measurements ({names})")
        connection.exec_driver_sql(
            f"INSERT INTO person_measurements VALUES ({marks})", [tuple(row) for row in rows]
        )
    return engine


_sqlalchemy.create_engine = create_engine
