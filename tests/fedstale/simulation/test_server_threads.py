"""Apps whose own threads ask clients take the virtual time of one that asks all at once."""

import asyncio
import multiprocessing.pool
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait

import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from tiny import COSTS, counting_app, fleet, message_to

from fedstale.errors import ConfigError, RunEnded
from fedstale.simulation import TraceGrid
from fedstale.strategies import FedBuff

pytestmark = pytest.mark.timeout(60)

NODES = [1000, 1001, 1002, 1003, 1004]
SPEEDS = [1.0, 2.0, 0.5, 4.0, 0.8]
ALWAYS = [(0.0, 1e6)]
BEFORE = threading.Lock()
"""A lock that was made before any run."""


def serve(main: Callable, **options):
    """Run a ServerApp's main; return its grid, and what it has returned."""
    traces = fleet([ALWAYS] * len(NODES), length=1e6, compute=SPEEDS)
    grid = TraceGrid(traces, counting_app(), costs=COSTS, **options)
    before, found = set(threading.enumerate()), []
    with grid.running():
        grid.serve(lambda *given: found.append(main(*given)), Context(1, 1, {}, RecordDict(), {}))
    left = {t.name for t in threading.enumerate()} - {t.name for t in before} - {"fedstale-turns"}
    assert not left
    return grid, found[0]


def twice(main: Callable, **options):
    """Run a main twice, with equal events; return the grid and what it returned."""
    (first, _), (grid, found) = serve(main, **options), serve(main, **options)
    pd.testing.assert_frame_equal(first.events().to_pandas(), grid.events().to_pandas())
    assert all(row["status"] == "reported" for row in grid.events().to_pylist())
    return grid, found


def ask(grid, node, n=1):
    """Ask a client, n times, and return the virtual instants of the replies."""
    instants = []
    for _ in range(n):
        (reply,) = grid.send_and_receive([message_to(node)])
        assert reply.has_content()
        instants.append(grid.now())
    return instants


def together(grid, _):
    """Ask all at once, and return when each has answered."""
    ids = set(grid.push_messages([message_to(node) for node in NODES]))
    instants = {}
    while ids:
        for reply in grid.pull_messages(list(ids)):
            ids.remove(reply.metadata.reply_to_message_id)
            instants[reply.metadata.src_node_id] = grid.now()
    return [instants[node] for node in NODES]


AT = serve(together)[1]
"""When each node answers that is asked at 0, in s."""


def by_pool(grid, _):
    with ThreadPoolExecutor(8) as pool:
        return [at for (at,) in pool.map(lambda node: ask(grid, node), NODES)]


def by_futures(grid, _):
    pool, found = ThreadPoolExecutor(8), {}
    futures = {pool.submit(ask, grid, node): node for node in NODES}
    for future in as_completed(futures):
        found[futures[future]] = grid.now()
    pool.shutdown()
    return [found[node] for node in NODES]


def by_first_completed(grid, _):
    with ThreadPoolExecutor(8) as pool:
        futures, found = {pool.submit(ask, grid, node): node for node in NODES}, {}
        while futures:
            done, _ = wait(futures, return_when=FIRST_COMPLETED)
            found |= {futures.pop(future): grid.now() for future in done}
    return [found[node] for node in NODES]


def by_threads(grid, _):
    found = {}

    def one(node):
        (found[node],) = ask(grid, node)

    threads = [threading.Thread(target=one, args=(node,)) for node in NODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(thread.is_alive() for thread in threads)
    return [found[node] for node in NODES]


def by_thread_class(grid, _):
    class Asking(threading.Thread):
        def __init__(self, node):
            super().__init__()
            self.node = node

        def run(self):
            (self.at,) = ask(grid, self.node)

    threads = [Asking(node) for node in NODES]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.25)
    return [thread.at for thread in threads]


def by_thread_pool(grid, _):
    with multiprocessing.pool.ThreadPool(5) as pool:
        return [at for (at,) in pool.map(lambda node: ask(grid, node), NODES, chunksize=1)]


def by_queues(grid, _):
    asked, answered = queue.Queue(), queue.Queue()

    def work():
        while (node := asked.get()) is not None:
            answered.put((node, *ask(grid, node)))

    threads = [threading.Thread(target=work) for _ in NODES]
    for thread in threads:
        thread.start()
    for node in NODES:
        asked.put(node)
    found = {}
    for _ in NODES:
        node, found[node] = answered.get()
        assert grid.now() == found[node]
    for _ in NODES:
        asked.put(None)
    return [found[node] for node in NODES]


def by_daemons_that_serve_for_ever(grid, _):
    asked, found = queue.Queue(), {}

    def work():
        while True:
            node = asked.get()
            (found[node],) = ask(grid, node)
            asked.task_done()

    for _ in NODES:
        threading.Thread(target=work, daemon=True).start()
    for node in NODES:
        asked.put(node)
    asked.join()
    return [found[node] for node in NODES]


def by_pushing_threads(grid, _):
    found, arrived = {}, threading.Condition()

    def one(node):
        (message_id,) = grid.push_messages([message_to(node)])
        while not (replies := list(grid.pull_messages([message_id]))):
            time.sleep(0)
        assert replies[0].metadata.src_node_id == node
        with arrived:
            found[node] = grid.now()
            arrived.notify()

    for node in NODES:
        threading.Thread(target=one, args=(node,)).start()
    with arrived:
        arrived.wait_for(lambda: len(found) == len(NODES))
    return [found[node] for node in NODES]


def by_one_that_pulls_all(grid, _):
    found, all_sent = {}, threading.Event()

    def pull():
        all_sent.wait()
        while len(found) < len(NODES):
            for reply in grid.pull_messages():
                found[reply.metadata.src_node_id] = grid.now()

    thread = threading.Thread(target=pull)
    thread.start()
    for node in NODES:
        grid.push_messages([message_to(node)])
    all_sent.set()
    thread.join()
    return [found[node] for node in NODES]


def by_barrier(grid, _):
    barrier, found = threading.Barrier(len(NODES) + 1), {}

    def one(node):
        barrier.wait()
        (found[node],) = ask(grid, node)
        barrier.wait()

    for node in NODES:
        threading.Thread(target=one, args=(node,)).start()
    barrier.wait()
    barrier.wait()
    return [found[node] for node in NODES]


def by_threads_of_threads(grid, _):
    with ThreadPoolExecutor(2) as outer:

        def part(nodes):
            with ThreadPoolExecutor(3) as inner:
                return [at for (at,) in inner.map(lambda node: ask(grid, node), nodes)]

        first, second = outer.map(part, [NODES[:2], NODES[2:]])
    return first + second


def by_to_thread(grid, _):
    async def main():
        return await asyncio.gather(*(asyncio.to_thread(ask, grid, node) for node in NODES))

    return [at for (at,) in asyncio.run(main())]


def by_executor_of_a_loop(grid, _):
    async def main():
        loop, found = asyncio.get_running_loop(), {}
        with ThreadPoolExecutor(5) as pool:
            futures = [loop.run_in_executor(pool, lambda n=n: (n, ask(grid, n))) for n in NODES]
            for future in asyncio.as_completed(futures):
                node, (at,) = await future
                assert grid.now() == at
                found[node] = at
        return [found[node] for node in NODES]

    return asyncio.run(main())


def by_loop_in_a_thread(grid, _):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def one(node):
        return await asyncio.to_thread(ask, grid, node)

    futures = [asyncio.run_coroutine_threadsafe(one(node), loop) for node in NODES]
    found = [at for (at,) in (future.result() for future in futures)]
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return found


def by_older_proxies(grid, context):
    found = {}

    class AsyncServer(Server):
        def fit(self, num_rounds, timeout):
            clients = self._client_manager.all()
            with ThreadPoolExecutor(len(clients)) as pool:
                futures = {
                    pool.submit(client.get_properties, None, timeout, 1): int(cid)
                    for cid, client in clients.items()
                }
                for future in as_completed(futures):
                    found[futures[future]] = grid.now()
            return None, 0.0

    del AsyncServer, context
    return found


FORMS = [
    *(by_pool, by_futures, by_first_completed, by_threads, by_thread_class, by_thread_pool),
    *(by_queues, by_daemons_that_serve_for_ever, by_pushing_threads, by_one_that_pulls_all),
    *(by_barrier, by_threads_of_threads),
    *(by_to_thread, by_executor_of_a_loop, by_loop_in_a_thread),
]


@pytest.mark.parametrize("main", FORMS)
def test_devices_asked_by_threads_work_at_the_same_time(main):
    grid, instants = twice(main)
    assert instants == AT
    assert {row["sent_at"] for row in grid.events().to_pylist()} == {0.0}
