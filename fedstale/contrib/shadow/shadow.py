"""ShadowSync: a site trains on its own weights, and exchanges models in the background.

`Shadow` is a client mod for simulations, and `Background` a thread on a real machine.
"""

import atexit
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Annotated, Any, Literal, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedstale.errors import ConfigError
from fedstale.flower import ClientAppCallable, model_of, record_of
from fedstale.strategies.server import records_in
from fedstale.strategies.types import Model, Positive, Share, checked
from fedstale.traces import TraceSet

SHADOW, ANCHOR, CLOCK = "fedstale.shadow", "fedstale.shadow.anchor", "fedstale.shadow.clock"
"""Names of the ConfigRecord of a reply with its `steps`, and of records in a site's state."""

Sync = Annotated[Literal["easgd", "ma", "bmuf"], "one of 'easgd', 'ma', 'bmuf'"]
Step: TypeAlias = Callable[[], object]
Read: TypeAlias = Callable[[], ArrayRecord]
Write: TypeAlias = Callable[[ArrayRecord], object]


class Shadow:
    """Answers with the training since the last message; a client mod for simulations.

    A message is answered as it comes. The app trains from the site's own weights, kept in the
    Context's state, by as many steps as the device's trace has room for since the message before,
    while it is online; the rest of a step counts for the next. Messages must cost no work,
    `work={"train": 0.0}`, so the clock runs for what travels alone. The first one to a site brings
    its weights, and its reply no change.

    With w a site's weights, W the model in a message and a = `elastic`, w becomes (1 - a) w + a W.
    The change in the reply, and the server that makes the algorithm of it, are by `sync`:

    - "easgd": a (w - W), with `FedBuff(n, 1, staleness=constant())`; where n a > 1, `eta=1/(n*a)`
      besides, or n sites that answer at once move the model beyond their mean.
    - "ma": w less what was sent before; with `eta=1/n`, the model is the mean of what n sites have
      sent last, if all began with the same one.
    - "bmuf": the training alone, for a server optimizer such as `Momentum`.

    Arrays of integers stay the site's own. Mods that change what travels come before it.

    Args:
        elastic: a, in [0, 1]: 0 never hears of the server, and 1 takes its model.
        sync: elastic averaging, model averaging, or block updates.
        work_per_step: work units of a local step, > 0; for simulations alone.
        steps: key of the run config with the app's number of local steps, which the mod sets.

    Reference:
        Zheng et al. ShadowSync: Performing Synchronization in the Background for Highly Scalable
        Distributed Training. 2020 (arXiv 2003.03477).
        Zhang, Choromanska, LeCun. Deep Learning with Elastic Averaging SGD. NeurIPS 2015.
        Chen, Huo. Scalable Training of Deep Learning Machines by Incremental Block Training with
        Intra-Block Parallel Optimization and Blockwise Model-Update Filtering. ICASSP 2016.

    Differences from the paper:
        Each site exchanges with a server in its own time, also where trainers average all at once.
        A site's move towards the model is no part of its block update.
    """

    @checked
    def __init__(
        self,
        elastic: Share = 0.5,
        sync: Sync = "easgd",
        *,
        work_per_step: Positive | None = None,
        steps: str = "local-steps",
    ) -> None:
        self.elastic, self.sync = float(elastic), sync
        self.work_per_step, self.steps = work_per_step, steps

    def exchange(self, own: Model, server: Model, anchor: Model) -> tuple[Model, Model, Model]:
        """Return a site's weights after an exchange, the arrays of its reply, and its next anchor.

        Args:
            own: weights of the site.
            server: the model in the message, whose arrays are alike.
            anchor: what the change is counted from: the last anchor, or else the first model.

        Example:
            >>> import numpy as np
            >>> own, reply, _ = Shadow(0.25).exchange({"w": np.ones(1)}, {"w": np.zeros(1)}, {})
            >>> own["w"], reply["w"]
            (array([0.75]), array([0.25]))
        """
        a, moved, reply = self.elastic, own.copy(), own.copy()
        for name in (name for name, w in own.items() if w.dtype.kind == "f"):
            w, other = own[name], server[name]
            moved[name], reply[name] = (1.0 - a) * w + a * other, (1.0 - a) * other + a * w
            if self.sync != "easgd":
                reply[name] = other + (w - anchor[name])
        return moved, reply, own if self.sync == "ma" else moved

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train on from the site's own weights, and answer with an exchange.

        Raises:
            ConfigError: no work of a step is given, or no device is replayed in this process.
        """
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        key, server = model_in(message)
        n_steps, state, config = self._n_steps(context), context.state, context.run_config
        kept = state.array_records
        own, anchor = (model_of(kept[k]) if k in kept else server for k in (SHADOW, ANCHOR))
        reply = bare_reply(message, 1)
        if n_steps:
            message.content[key] = record_of(own)
            context.run_config = {**config, self.steps: n_steps}
            try:
                reply = call_next(message, context)
            finally:
                context.run_config = config
            if reply.has_error():
                return reply
            key, own = model_in(reply)
        own, sent, anchor = self.exchange(own, server, anchor)
        state[SHADOW], state[ANCHOR] = record_of(own), record_of(anchor)
        reply.content[key] = record_of(sent)
        reply.content[SHADOW] = ConfigRecord({"steps": n_steps})
        return reply

    def _n_steps(self, context: Context) -> int:
        """Return the steps since the last message, and count anew."""
        device: Any = getattr(context, "device", None)
        if self.work_per_step is None or not hasattr(device, "replay"):
            raise ConfigError("Shadow: expected work_per_step > 0, in a simulation, --workers 1")
        now, traces = device.job.downloaded_at, device.replay.traces
        before: Any = context.state.get(CLOCK, {"since": now, "rest": 0.0})
        work = before["rest"] + work_between(traces, device.job.device, before["since"], now)
        n_steps, rest = divmod(work, self.work_per_step)
        context.state[CLOCK] = ConfigRecord({"since": now, "rest": rest})
        return int(n_steps)


class Background:
    """Trains in a thread from the first message on, and answers each message at once.

    It belongs into a process that stays (`fedstale.contrib.sites.resident`). A step holds a lock,
    which an exchange takes for copies alone: of the weights, and of how far they move. Training
    ends with the process, by a step that raises, which is the answer to the next message, and after
    `idle_s` s without a message; the next that is answered starts it again. Weights are in memory,
    so another process begins with the model of its first message.

    Args:
        shadow: how weights are merged.
        step: takes a local step.
        read: returns a copy of the weights.
        write: replaces the weights.
        idle_s: for how long training goes on without a message, in s, > 0.
    """

    def __init__(
        self, shadow: Shadow, step: Step, read: Read, write: Write, idle_s: float = 900.0
    ) -> None:
        self._shadow, self._step, self._read, self._write = shadow, step, read, write
        self._idle_s, self._until, self._n_steps = idle_s, 0.0, 0
        self._turn, self._lock, self._ends = Lock(), Lock(), Event()
        self._anchor: Model | None = None
        self._problem: Exception | None = None
        self._thread = Thread()
        # Before the interpreter takes down libraries that a step uses.
        atexit.register(self.stop)

    def answer(self, message: Message, context: Context) -> Message:
        """Exchange with the model in a message of training, and return the reply.

        Raises:
            ConfigError: the node is simulated, and its time is not that of a thread.
            Exception: what a step has raised since the last message.
        """
        # A simulated node has a device.
        if hasattr(context, "device"):
            instead = "in a simulation, use the client mod Shadow(..., work_per_step=...)"
            raise ConfigError(f"Background trains in wall time: {instead}")
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        self._until = time.monotonic() + self._idle_s
        key, server = model_in(message)
        own, n_steps = self._swap(lambda own: server if self._anchor is None else own)
        moved, sent, self._anchor = self._shadow.exchange(own, server, self._anchor or server)
        pull = {name: x - own[name] for name, x in moved.items() if x.dtype.kind == "f"}
        self._swap(lambda now: now | {name: now[name] + x for name, x in pull.items()}, n_steps)
        if not self._thread.is_alive():
            self._ends.clear()
            self._thread = Thread(target=self._train, name="shadow", daemon=True)
            self._thread.start()
        reply = bare_reply(message, max(n_steps, 1))
        reply.content[key] = record_of(sent)
        reply.content[SHADOW] = ConfigRecord({"steps": n_steps})
        return reply

    def stop(self) -> None:
        """End the training, after the step that it is at."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _swap(self, change: Callable[[Model], Model], counted: int = 0) -> tuple[Model, int]:
        """Replace the weights between two steps; return them, and the steps less some."""
        # Behind a step, the thread waits for its turn instead of taking the lock again.
        with self._turn, self._lock:
            self._n_steps -= counted
            made = change(model_of(self._read()))
            self._write(record_of(made))
            return made, self._n_steps

    def _train(self) -> None:
        try:
            while not self._ends.is_set() and time.monotonic() < self._until:
                with self._turn:
                    pass
                with self._lock:
                    self._step()
                    self._n_steps += 1
        except Exception as problem:
            self._problem = problem


def work_between(traces: TraceSet, device: int, start: float, end: float) -> float:
    """Return the work units that a device can do between two instants in s, while it is online."""
    online, compute = traces.channel("availability"), traces.channel("compute")
    at, done = start, 0.0
    while at < end:
        opens, closes = (float(x[0]) for x in online.window_at_or_after([device], at))
        begin, at = min(opens, end), min(closes, end)
        done += float(compute.integral([device], begin, at)[0])
    return done


def model_in(message: Message) -> tuple[str, Model]:
    """Return the only model in a message, behind the name of its record."""
    ((key, record),) = records_in(message.content, ArrayRecord).items()
    return key, model_of(record)


def bare_reply(message: Message, n: int) -> Message:
    """Return a reply that states a number of examples alone."""
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": n})}), reply_to=message)
