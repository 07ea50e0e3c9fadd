"""Sites that screen their neighbours' convolutional networks, beside the same rule at a server.

The sites, jobs, liars and neighbours of `peers/run.py`, for a quarter of an hour and without
waiting; two sites lie. A site trains a network of two convolutions on some 300 images of
Fashion-MNIST, an epoch a job, and is tested on 2,000 others.

Run it with:
python benchmarks/peers/clothes.py FOLDER [--keep FILE] [--jobs N] [--seeds N] [--quick]
"""

import argparse
import gzip
import logging
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor, nn

from fedstale.apps import classification
from fedstale.flower import model_of
from fedstale.strategies.types import Model

sys.path.append(str(Path(__file__).parents[1]))
from lab.kept import Kept, play_missing
from lab.results import write_result
from peers.run import ALPHA, NONE, SEEDS, Case, N, Task, compared, run

UNTIL_S, LIARS = 900.0, 2
ARMS = ("gossip, async", "server, async")
RULES, ATTACKS = ("mean", "trimmed mean", "median"), (NONE, "sign flip", "ALIE")
TRAIN, TEST, BATCH, RATE, MOMENTUM = 6000, 2000, 16, 0.02, 0.9
Data = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Return the network, as it is drawn once for all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
        )


def with_weights(model: ArrayRecord) -> nn.Module:
    """Return the network with some weights."""
    made = network()
    made.load_state_dict(model.to_torch_state_dict())
    return made


@cache
def images(folder: str, seed: int) -> tuple[list[Data], Data]:
    """Return what each site trains on, and what models are tested on."""
    names = [("images-idx3", 28 * 28, 16), ("labels-idx1", 1, 8)]
    n = TRAIN + TEST
    pixels, labels = (
        np.frombuffer(
            gzip.decompress((Path(folder) / f"train-{name}-ubyte.gz").read_bytes()),
            *(np.uint8, n * size, at),
        )
        for name, size, at in names
    )
    rng = np.random.default_rng((seed, 0))
    order = rng.permutation(n)
    x = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)[order].astype(np.float32) / 255)
    y = torch.from_numpy(labels[order].astype(np.int64))
    dealt = classification.assign(labels[order][TEST:], N, ALPHA, rng)
    own = [(x[TEST:][mine], y[TEST:][mine]) for mine in map(torch.from_numpy, dealt)]
    return own, (x[:TEST], y[:TEST])


def clothes(folder: str) -> Task:
    """Return what sites learn of the images in a folder."""

    def app(seed: int, mods: Sequence[Mod]) -> ClientApp:
        made = ClientApp(mods=list(mods))

        @made.train()
        def train(message: Message, context: Context) -> Message:
            site = int(context.node_config["partition-id"])
            x, y = images(folder, seed)[0][site]
            number = int.from_bytes(message.metadata.message_id.encode())
            order = np.random.default_rng((seed, site, number)).permutation(len(y))
            trained = with_weights(message.content.array_records["arrays"])
            optimizer = torch.optim.SGD(trained.parameters(), lr=RATE, momentum=MOMENTUM)
            for batch in torch.from_numpy(order).split(BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(trained(x[batch]), y[batch])
                torch.autograd.backward(loss)
                optimizer.step()
            arrays = ArrayRecord(trained.state_dict())
            metrics = MetricRecord({"num-examples": len(y)})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        return made

    @torch.no_grad()
    def accuracy(model: Model, seed: int) -> float:
        x, y = images(folder, seed)[1]
        weights = {name: torch.from_numpy(array) for name, array in model.items()}
        tested = network()
        tested.load_state_dict(weights)
        return float((tested(x).argmax(1) == y).float().mean())

    return Task(model_of(ArrayRecord(network().state_dict())), accuracy, app)


def cases(seeds: Sequence[int]) -> list[Case]:
    """Return all cases."""
    return [
        Case(arm, rule, LIARS, attack, seed)
        for seed in seeds
        for arm in ARMS
        for rule in RULES
        for attack in ATTACKS
    ]


def reached(case: Case, folder: str) -> dict[str, float]:
    """Return what one run reached, and what it cost."""
    torch.set_num_threads(1)
    return run(case, UNTIL_S, clothes(folder))


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of Fashion-MNIST's files")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds, 1 to 5")
    parser.add_argument("--quick", action="store_true", help="a seed of the first three cases")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    kept, seeds = Kept(args.keep), SEEDS[: args.seeds]
    folder = str(args.folder.resolve())
    if args.quick:
        seeds = SEEDS[:1]
    wanted = cases(seeds)[: 3 if args.quick else None]
    tasks = ((list(case), partial(reached, case, folder)) for case in wanted)
    play_missing(kept, tasks, args.jobs, each=lambda case, found: print(*case, found, flush=True))
    some = f" --seeds {args.seeds}" if args.seeds != len(SEEDS) else ""
    command = f"python benchmarks/peers/clothes.py FOLDER{some}"
    rows = compared(kept, [case for case in wanted if case.seed == seeds[0]], seeds)
    write_result("site_peers_clothes", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
