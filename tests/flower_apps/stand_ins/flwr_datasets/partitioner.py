"""Partitioners that give a node every n-th example, some columns or one value of a column."""

import numpy as np


class IidPartitioner:
    def __init__(self, num_partitions=10, **_):
        self.num_partitions = num_partitions

    def part(self, data, partition_id):
        first = partition_id % self.num_partitions
        return data.select(range(first, len(data), self.num_partitions))


class DirichletPartitioner(IidPartitioner):
    pass


class PathologicalPartitioner(IidPartitioner):
    pass


class NaturalIdPartitioner:
    def __init__(self, partition_by):
        self.dataset, self._column = None, partition_by

    def part(self, data, partition_id):
        values = np.asarray(data[self._column])
        return data.select(np.flatnonzero(values == sorted(set(values))[partition_id]))

    def load_partition(self, partition_id):
        return self.part(self.dataset, partition_id)


class VerticalSizePartitioner:
    def __init__(self, partition_sizes, active_party_columns, **_):
        self._sizes, self._labels = partition_sizes, active_party_columns

    def part(self, data, partition_id):
        names = [name for name in data.column_names if name != self._labels]
        first = sum(self._sizes[:partition_id])
        return data.select_columns(names[first : first + self._sizes[partition_id]])
