"""Apps whose own threads ask clients take the virtual time of one that asks all at once."""

import asyncio
import logging.handlers
import multiprocessing.pool
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import (
    FIRST_COMPLETED,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from time import perf_counter as wall_s

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.server import (
    History,
    Server,
    ServerAppComponents,
    ServerConfig,
    SimpleClientManager,
)
from flwr.serverapp import ServerApp
from tiny import COSTS, counting_app, fleet, message_to

from fedstale import simulate
from fedstale.compat import threads
from fedstale.errors import ConfigError, RunEnded
from fedstale.simulation import TraceGrid
from fedstale.strategies import FedBuff

pytestmark = pytest.mark.timeout(60)

NODES = [1000, 1001, 1002, 1003, 1004]
SPEEDS = [1.0, 2.0, 0.5, 4.0, 0.8]
ALWAYS = [(0.0, 1e6)]
SETTINGS = {
    "work_per_example": 1.0,
    "evaluate_work_per_example": 0.5,
    "epochs": 1,
    "examples": 10,
    "model_bytes": 10**6,
}
BEFORE = threading.Lock()
"""A lock that was made before any run."""


def serve(main: Callable, **options):
    """Run a ServerApp's main; return its grid, and what it has returned."""
    traces = fleet([ALWAYS] * len(NODES), length=1e6, compute=SPEEDS)
    grid = TraceGrid(traces, counting_app(), costs=COSTS, **options)
    before, found = set(threading.enumerate()), []
    with grid.running():
        found.append(main(grid, Context(1, 1, {}, RecordDict(), {})))
    left = {t.name for t in threading.enumerate()} - {t.name for t in before}
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


@pytest.mark.parametrize("kind", ["in the run", "before the run"])
def test_a_lock_held_while_a_client_works_lets_one_work_at_a_time(kind):
    lock = BEFORE

    def main(grid, _):
        nonlocal lock
        lock = threading.Lock() if kind == "in the run" else BEFORE

        def one(node):
            with lock:
                return ask(grid, node)

        with ThreadPoolExecutor(5) as pool:
            return [at for (at,) in pool.map(one, NODES)]

    grid, instants = twice(main)
    assert sorted(instants)[-1] == pytest.approx(sum(AT), rel=1e-6)
    assert [row["sent_at"] for row in grid.events().to_pylist()] == [0.0, *sorted(instants)[:-1]]


def test_every_device_goes_on_by_itself_and_no_reply_is_lost():
    def main(grid, _):
        replies, lock = [], threading.RLock()

        def loop(node):
            for _ in range(3):
                found = ask(grid, node)
                with lock:
                    replies.append((*found, node))

        threads = [threading.Thread(target=loop, args=(node,)) for node in NODES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    _, replies = twice(main)
    assert replies == sorted(replies)
    for node, at in zip(NODES, AT, strict=True):
        assert [t for t, n in replies if n == node] == pytest.approx([at, 2 * at, 3 * at])


def asleep(seconds):
    time.sleep(seconds)


def waits_for_an_event(seconds):
    assert not threading.Event().wait(timeout=seconds)


def waits_for_a_condition(seconds):
    with (condition := threading.Condition()):
        assert not condition.wait_for(lambda: False, timeout=seconds)


def waits_at_a_queue(seconds):
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=seconds)


def waits_at_a_simple_queue(seconds):
    with pytest.raises(queue.Empty):
        queue.SimpleQueue().get(timeout=seconds)


def waits_for_a_lock(seconds):
    (lock := threading.Lock()).acquire()
    assert not lock.acquire(timeout=seconds)


def waits_for_a_result(seconds):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(time.sleep, 2 * seconds)
        with pytest.raises(TimeoutError):
            future.result(timeout=seconds)
        assert future.cancel() is False
        now = time.monotonic()
    assert time.monotonic() == now + seconds


def joins(seconds):
    thread = threading.Thread(target=time.sleep, args=(1.5 * seconds,))
    thread.start()
    thread.join(seconds)
    assert thread.is_alive()


def sleeps_in_a_loop(seconds):
    asyncio.run(asyncio.sleep(seconds))


def times_out_in_a_loop(seconds):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), seconds)

    asyncio.run(main())


def is_called_by_a_timer(seconds):
    called = threading.Event()
    threading.Timer(seconds, called.set).start()
    called.wait()


WAITS = [
    *(asleep, waits_for_an_event, waits_for_a_condition, waits_at_a_queue),
    *(waits_at_a_simple_queue, waits_for_a_lock, sleeps_in_a_loop, times_out_in_a_loop),
    *(is_called_by_a_timer, joins),
]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("pause", WAITS)
def test_a_timeout_is_one_of_the_virtual_clock(pause, others):
    def main(grid, _):
        pool = ThreadPoolExecutor(1)
        future = pool.submit(ask, grid, NODES[2]) if others else None
        began, wall = time.time(), wall_s()
        pause(5.0)
        took = time.time() - began, wall_s() - wall
        if future is not None:
            assert future.result() == [AT[2]]
        return took

    _, (virtual_s, took_s) = twice(main)
    assert virtual_s == 5.0
    assert took_s < 2.0


def test_a_future_times_out_in_virtual_time():
    _, _ = twice(lambda *_: waits_for_a_result(5.0))


def test_a_loop_times_and_asks_at_the_same_time():
    async def app(grid):
        ticks = []

        async def tick():
            while True:
                await asyncio.sleep(1.0)
                ticks.append(time.time())

        ticking = asyncio.create_task(tick())
        began = time.time()
        await asyncio.gather(*(asyncio.to_thread(ask, grid, node) for node in NODES))
        ticking.cancel()
        return [at - began for at in ticks]

    _, ticks = twice(lambda grid, _: asyncio.run(app(grid)))
    assert ticks == [float(s) for s in range(1, int(max(AT)) + 1)]


def bare(grid, node, n):
    thread = threading.Thread(target=ask, args=(grid, node, n))
    thread.start()
    thread.join()


def pooled(grid, node, n):
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, grid, node, n).result()


def queued(grid, node, n):
    results = queue.Queue()
    threading.Thread(target=lambda: results.put(ask(grid, node, n))).start()
    results.get()


def in_thread_pool(grid, node, n):
    with multiprocessing.pool.ThreadPool(2) as pool:
        pool.apply(ask, (grid, node, n))


def in_loop(grid, node, n):
    asyncio.run(asyncio.to_thread(ask, grid, node, n))


def forgotten(grid, node, n):
    threading.Thread(target=ask, args=(grid, node, n)).start()


ENDS = [bare, pooled, queued, in_thread_pool, in_loop, forgotten]


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_run_in_a_thread_ends_the_app(end, capfd):
    with pytest.raises(RunEnded, match="reached 100 s of virtual time"):
        serve(lambda grid, _: end(grid, NODES[0], 1000), until_s=100.0)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("end", [bare, pooled, in_loop, forgotten])
def test_a_setting_that_is_wrong_in_a_thread_fails_the_app(end, capfd):
    with pytest.raises(ConfigError, match="dst_node_id = 7"):
        serve(lambda grid, _: end(grid, 7, 1))
    assert "Traceback" not in capfd.readouterr().err


def test_an_exception_in_a_pool_is_raised_where_its_result_is_asked_for():
    with pytest.raises(ZeroDivisionError):
        serve(lambda *_: ThreadPoolExecutor(1).submit(lambda: 1 / 0).result())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_ends_the_thread_alone():
    def main(grid, _):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        return ask(grid, NODES[0])

    assert twice(main)[1] == [AT[0]]


def test_threads_left_by_the_app_come_to_their_end_unless_they_are_daemons():
    def main(grid, _):
        ThreadPoolExecutor(1).submit(ask, grid, NODES[0], 2)
        threading.Thread(target=ask, args=(grid, NODES[1])).start()
        threading.Thread(target=ask, args=(grid, NODES[2], 10), daemon=True).start()
        threading.Thread(target=queue.Queue().get, daemon=True).start()

    (grid, _), (again, _) = serve(main), serve(main)
    statuses = [(row["device_id"], row["status"]) for row in grid.events().to_pylist()]
    assert statuses == [(row["device_id"], row["status"]) for row in again.events().to_pylist()]
    assert sorted(status for _, status in statuses) == ["in-flight", *["reported"] * 4]
    assert grid.now() == pytest.approx(2 * AT[0])


def test_threads_that_wait_for_each_other_end_the_run(monkeypatch):
    monkeypatch.setattr(threads, "_DEADLOCK_S", 0.2)
    monkeypatch.setattr(threads, "_LOOK_S", 0.05)

    def main(*_):
        thread = threading.Thread(target=queue.Queue().get)
        thread.start()
        thread.join()

    with pytest.raises(RunEnded, match="each thread of the app waits for another") as ended:
        serve(main)
    assert ended.value.stuck


def polls_without_sleep(grid, done):
    while not done.is_set():
        grid.pull_messages([])


def polls_by_sleep_of_nothing(grid, done):
    while not done.is_set():
        time.sleep(0)


def polls_nodes(grid, done):
    while not done.is_set():
        grid.get_node_ids()


def polls_by_sleeping(grid, done):
    while not done.is_set():
        grid.get_node_ids()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "poll", [polls_without_sleep, polls_by_sleep_of_nothing, polls_nodes, polls_by_sleeping]
)
def test_a_thread_that_polls_does_not_hold_up_the_others(poll):
    def main(grid, _):
        done, found = threading.Event(), []

        def one():
            found.extend(ask(grid, NODES[2], 2))
            done.set()

        threading.Thread(target=one).start()
        poll(grid, done)
        return found, grid.now()

    _, (found, now) = twice(main)
    assert found == pytest.approx([AT[2], 2 * AT[2]])
    assert now == pytest.approx(found[-1], abs=0.2)


def test_a_thread_that_was_started_before_the_run_may_not_ask():
    started = ThreadPoolExecutor(1)
    started.submit(int).result()
    with pytest.raises(ConfigError, match="expected one that the ServerApp has started"):
        serve(lambda grid, _: started.submit(ask, grid, NODES[0]).result())
    started.shutdown()


def start(grid, seed=1):
    strategy = FedBuff(concurrency=2, buffer_size=2, seed=seed)
    arrays = ArrayRecord([np.zeros(3, dtype=np.float32)])
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3)


def test_a_strategy_runs_in_a_thread_as_it_does_in_the_first():
    def main(grid, _):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(start, grid).result().arrays.to_numpy_ndarrays()[0]

    grid, model = serve(main)
    alone, same = serve(lambda grid, _: start(grid).arrays.to_numpy_ndarrays()[0])
    assert (model == same).all()
    pd.testing.assert_frame_equal(grid.events().to_pandas(), alone.events().to_pandas())


@pytest.mark.parametrize("wait_for", ["join", "result"])
def test_two_strategies_at_a_time_are_refused_before_a_client_works(wait_for):
    grids = []

    def main(grid, _):
        grids.append(grid)
        if wait_for == "join":
            threads = [threading.Thread(target=start, args=(grid, seed)) for seed in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda seed: start(grid, seed), (1, 2)))

    with pytest.raises(ConfigError, match="expected one strategy at a time"):
        serve(main)
    assert {row["status"] for row in grids[0].events().to_pylist()} <= {"in-flight"}


def test_threads_that_a_library_starts_see_wall_time():
    class Noting(logging.Handler):
        def emit(self, record):
            del record
            seen.append(time.time())

    def main(grid, _):
        records = queue.SimpleQueue()
        listener = logging.handlers.QueueListener(records, Noting())
        listener.start()
        records.put(logging.makeLogRecord({}))
        found = ask(grid, NODES[0])
        listener.stop()
        return found

    seen = []
    assert twice(main)[1] == [AT[0]]
    assert seen == pytest.approx([time.time()] * 2, abs=3600)


def test_a_thread_that_waits_for_a_socket_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_S", 0.1)
    monkeypatch.setattr(threads, "_LOOK_S", 0.05)

    def main(grid, _):
        here, there = socket.socketpair()
        thread = threading.Thread(target=here.recv, args=(1,))
        thread.start()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ask, grid, NODES[0]).result()
        there.send(b"x")
        thread.join()
        here.close()
        there.close()
        return found

    assert twice(main)[1] == [AT[0]]


def test_an_interrupted_app_leaves_no_thread_behind():
    def main(grid, _):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda node: ask(grid, node, 10**9), NODES[:2]))

    before = threading.active_count()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        serve(main)
    time.sleep(0.1)
    assert threading.active_count() <= before


def test_rounds_limit_an_app_that_asks_from_a_pool(tmp_path):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        del context
        with ThreadPoolExecutor(5) as pool:
            for value in range(100):
                list(pool.map(lambda node, v=value: list(asked(grid, node, v)), NODES))

    def asked(grid, node, value):
        return grid.send_and_receive([message_to(node, value=float(value), group=str(value))])

    run = simulate(
        (app, counting_app()),
        traces=fleet([ALWAYS] * len(NODES), length=1e6, compute=SPEEDS),
        until="3 rounds",
        out=tmp_path / "run",
        **SETTINGS,
    )
    assert (run.status, run.reason) == ("stopped", "reached 3 rounds")
    assert run.summary["jobs"] == {"sent": 15, "reported": 15}


def test_a_server_of_the_older_api_asks_proxies_from_a_pool(tmp_path):
    found = []

    class AsyncServer(Server):
        def fit(self, num_rounds, timeout):
            del num_rounds
            clients = self._client_manager.all()
            ins = FitIns(ndarrays_to_parameters([np.zeros(3, dtype=np.float32)]), {})
            with ThreadPoolExecutor(len(clients)) as pool:
                futures = [pool.submit(c.fit, ins, timeout, 1) for c in clients.values()]
                found.extend(time.monotonic() for _ in as_completed(futures))
            assert all(future.result().num_examples == 10 for future in futures)
            return History(), time.monotonic()

    app = ServerApp(
        server_fn=lambda _: ServerAppComponents(
            server=AsyncServer(client_manager=SimpleClientManager()),
            config=ServerConfig(num_rounds=1),
        )
    )

    class Adding(NumPyClient):
        def fit(self, parameters, config):
            del config
            return [array + 1 for array in parameters], 10, {}

    run = simulate(
        (app, ClientApp(client_fn=lambda _: Adding().to_client())),
        traces=fleet([ALWAYS] * len(NODES), length=1e6, compute=SPEEDS),
        until="1h",
        out=tmp_path / "run",
        **SETTINGS,
    )
    assert run.summary["jobs"] == {"sent": 5, "reported": 5}
    assert found == pytest.approx(sorted(AT), abs=0.01)
