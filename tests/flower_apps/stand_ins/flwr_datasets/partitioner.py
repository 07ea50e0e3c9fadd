"""Partitioners: whatever their names promise, each gives a node every n-th example."""


class IidPartitioner:
    def __init__(self, num_partitions=10, **_):
        self.num_partitions = num_partitions

    def places(self, data, partition_id):
        return range(partition_id % self.num_partitions, len(data), self.num_partitions)


class DirichletPartitioner(IidPartitioner):
    pass


class PathologicalPartitioner(IidPartitioner):
    pass


class NaturalIdPartitioner(IidPartitioner):
    pass
