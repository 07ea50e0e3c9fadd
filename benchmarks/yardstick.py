"""How fast a machine is, so that figures of different machines can be held against one another."""

import statistics
import time

from batched import Clients, workloads

from fedstale.flower import identity


def naive_clients_per_s() -> float:
    """Return how many small clients a plain torch loop trains in a second, one thread.

    They are the clients of `batched.py`: 64-32-10 units, 20 digits, two epochs in steps of 8.
    """
    with identity(1):
        clients = Clients(workloads()[0], 32)
        rates = []
        for _ in range(8):
            started = time.perf_counter()
            clients.naive()
            rates.append(clients.n / (time.perf_counter() - started))
    return statistics.median(rates[1:])
