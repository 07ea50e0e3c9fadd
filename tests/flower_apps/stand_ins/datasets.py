"""As much of Hugging Face's `datasets` as Flower's examples use, with data that is at hand.

Images are scikit-learn's digits, enlarged to the shape that is asked for; tables are made up.
"""

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits, load_iris

_TEST = 100


class Dataset:
    def __init__(self, columns, transform=None, kind=None):
        self._columns, self._transform, self._kind = dict(columns), transform, kind

    @property
    def column_names(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._columns[key] if self._kind == "numpy" else list(self._columns[key])
        if isinstance(key, slice | list | np.ndarray):
            batch = {name: values[key] for name, values in self._columns.items()}
            if self._kind == "pandas":
                return pd.DataFrame(batch)
            return batch if self._transform is None else self._transform(batch)
        batch = {name: [values[key]] for name, values in self._columns.items()}
        batch = batch if self._transform is None else self._transform(batch)
        return {name: values[0] for name, values in batch.items()}

    @classmethod
    def from_pandas(cls, table):
        return cls({name: table[name].to_numpy() for name in table.columns})

    def select_columns(self, names):
        return Dataset({name: self._columns[name] for name in names}, self._transform, self._kind)

    def select(self, places):
        places = np.asarray(list(places))
        chosen = {name: values[places] for name, values in self._columns.items()}
        return Dataset(chosen, self._transform, self._kind)

    def train_test_split(self, test_size=0.25, seed=0, **_):
        order = np.random.default_rng(seed).permutation(len(self))
        n_test = max(1, round(test_size * len(self)))
        return DatasetDict(train=self.select(order[n_test:]), test=self.select(order[:n_test]))

    def with_transform(self, transform):
        return Dataset(self._columns, transform, self._kind)

    set_transform = with_transform

    def with_format(self, kind=None, **_):
        return Dataset(self._columns, self._transform, kind)

    def set_format(self, kind=None, **_):
        self._kind = kind

    def to_pandas(self):
        return pd.DataFrame(self._columns)


class DatasetDict(dict):
    def with_transform(self, transform):
        return DatasetDict({name: one.with_transform(transform) for name, one in self.items()})

    def with_format(self, kind=None, **_):
        return DatasetDict({name: one.with_format(kind) for name, one in self.items()})


def _images(size, n_channels):
    digits = load_digits()
    factor = -(-size // 8)
    pictures = (digits.images * 15.9).astype(np.uint8).repeat(factor, 1).repeat(factor, 2)
    pictures = pictures[:, :size, :size]
    if n_channels > 1:
        pictures = np.repeat(pictures[..., None], n_channels, axis=-1)
    return pictures, digits.target.astype(np.int64)


def _iris(names):
    iris = load_iris(as_frame=True).frame.sample(frac=1.0, random_state=0)
    return {name: iris.iloc[:, place].to_numpy() for place, name in enumerate(names)}


def _higgs(rng, n):
    inputs = rng.normal(size=(n, 28)).astype(np.float32)
    return {"label": (inputs[:, 0] > 0).astype(np.float32), "inputs": inputs}


def _incomes(rng, n):
    hours = rng.integers(10, 60, n)
    table = {"age": rng.integers(17, 90, n), "hours.per.week": hours}
    table |= {name: rng.integers(0, 9999, n) for name in ("fnlwgt", "capital.gain", "capital.loss")}
    table["education.num"] = rng.integers(1, 17, n)
    words = (
        "workclass",
        "education",
        "marital.status",
        "occupation",
        "relationship",
        "race",
        "sex",
        "native.country",
    )
    for name in words:
        table[name] = rng.choice(["A", "B", "C"], n)
    return table | {"income": np.where(hours > 40, ">50K", "<=50K")}


def _passengers(rng, n):
    women = rng.random(n) < 0.4
    return {
        "Survived": (rng.random(n) < np.where(women, 0.7, 0.2)).astype(np.int64),
        "Age": rng.uniform(1.0, 80.0, n),
        "Sex": np.where(women, "female", "male"),
        "Fare": rng.uniform(5.0, 200.0, n),
        "Siblings/Spouses Aboard": rng.integers(0, 4, n),
        "Name": np.where(women, "Mrs. Anna Doe", "Mr. John Doe"),
        "Parents/Children Aboard": rng.integers(0, 4, n),
        "Pclass": rng.integers(1, 4, n),
    }


def _all_of(name):
    rng = np.random.default_rng(0)
    if "cifar" in name:
        pictures, labels = _images(32, 3)
        return {"img": pictures, "label": labels}
    if "mnist" in name:
        pictures, labels = _images(28, 1)
        return {"image": pictures, "label": labels}
    if name == "scikit-learn/iris":
        names = ("SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm", "Species")
        return _iris(names)
    if name == "hitorilabs/iris":
        return _iris(("sepal_length", "sepal_width", "petal_length", "petal_width", "species"))
    tables = {"higgs": _higgs, "income": _incomes, "titanic": _passengers}
    for word, table in tables.items():
        if word in name:
            return table(rng, 600)
    raise ValueError(f"no stand-in for the data set {name!r}")


def load_dataset(path, *_, split=None, **__):
    columns = _all_of(path)
    whole = Dataset(columns)
    n = len(whole)
    n_test = min(_TEST, n // 5)
    parts = DatasetDict(
        train=whole.select(range(n - n_test)), test=whole.select(range(n - n_test, n))
    )
    return parts if split is None else parts[split]
