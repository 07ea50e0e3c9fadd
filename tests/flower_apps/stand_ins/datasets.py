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


def _all_of(name):
    if "cifar" in name:
        pictures, labels = _images(32, 3)
        return {"img": pictures, "label": labels}
    if "mnist" in name:
        pictures, labels = _images(28, 1)
        return {"image": pictures, "label": labels}
    if "iris" in name:
        iris = load_iris(as_frame=True).frame
        names = ["SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm", "Species"]
        return {name: iris.iloc[:, i].to_numpy() for i, name in enumerate(names)}
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
