"""As much of Flower Datasets as Flower's examples use, on the stand-in of `datasets`."""

from datasets import load_dataset

from flwr_datasets.partitioner import IidPartitioner


class FederatedDataset:
    def __init__(self, *, dataset, partitioners, **_):
        self._parts = load_dataset(dataset)
        self.partitioners = {
            split: IidPartitioner(num_partitions=one) if isinstance(one, int) else one
            for split, one in partitioners.items()
        }

    def load_partition(self, partition_id, split="train"):
        return self.partitioners[split].part(self._parts[split], partition_id)

    def load_split(self, split):
        return self._parts[split]
