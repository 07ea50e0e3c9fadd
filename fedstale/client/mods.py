"""Flower client mods: a device forecasts itself, sends fewer bytes, and sends arrays as one object.

`ForecastMod` does the first and the last, for any ClientApp, in one line. It measures what the
device does with each message, keeps that in the node's Context, and puts a forecast of the next job
into each reply, in a ConfigRecord of its own, which stock strategies ignore. Whatever goes wrong in
a forecast, the app's own reply goes out as it is. `CompressionMod` answers in the format that a
server asks for. Each of them states how much of the work an app has done that reads it
(`local_steps`, the one line by which a ClientApp reads its share).
"""

import logging
from collections.abc import Sequence
from contextvars import ContextVar, Token
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale import __version__
from fedstale.client import compression
from fedstale.errors import ProtocolError, TraceError
from fedstale.flower import ClientAppCallable, ErrorCode, Mod
from fedstale.strategies.server import advertised, can_unpack, pack, unpack
from fedstale.strategies.stages import (
    JOB_RECORD,
    QUERY,
    WORK,
    StepsDone,
    asked_share,
    fault_of_releases,
    is_asked,
    state_release,
    stated_release,
    steps_of,
)
from fedstale.strategies.types import FORECAST_RECORD, PROPERTIES_RECORD

if TYPE_CHECKING:
    from fedstale.client.forecasting import Record
    from fedstale.client.journal_history import JournalHistory
    from fedstale.traces.forecast import Forecaster

logger = logging.getLogger(__name__)


class StepRecorder:
    """Records the steps that an app does inside; recorders around one another share one record.

    Args:
        done: steps done before, where an app's training and its mods run apart.
    """

    # Around every message of a simulation: a generator would take three times as long.
    __slots__ = ("_token", "done")
    _token: "Token[StepRecorder | None]"

    def __init__(self, done: StepsDone | None = None) -> None:
        self.done = done

    def __enter__(self) -> "StepRecorder":
        """Return the outermost recorder; its `done` is None where the app reads no share."""
        outermost = _RECORDER.get() or self
        outermost.done = self.done or outermost.done
        self._token = _RECORDER.set(outermost)
        return outermost

    def __exit__(self, *problem: object) -> None:
        """Record no more."""
        _RECORDER.reset(self._token)


_RECORDER: ContextVar[StepRecorder | None] = ContextVar("fedstale-work", default=None)


def local_steps(message: Message, epochs: int, per_epoch: int) -> int:
    """Return how many local steps to take: all of some epochs, or the share that is asked for.

    The server's `work=` says the share; without it these are all. With any mod of fedstale around
    the app (`PackMod`, `CompressionMod` or `ForecastMod`) the reply states what was done.

    Args:
        message: of training.
        epochs: local epochs of a whole job, >= 0.
        per_epoch: steps, that is, batches, of one epoch, >= 0.

    Returns:
        From 1 to epochs x per_epoch, and 0 only where that is 0; a share is rounded down.

    Raises:
        ProtocolError: the message asks for something that is no share.

    Example:
        A loop over the batches of a loader, which may end within an epoch:

            steps = local_steps(message, epochs=5, per_epoch=len(loader))
            for batch in islice(chain.from_iterable(repeat(loader)), steps):
                ...
    """
    whole, share = epochs * per_epoch, asked_share(message.content)
    steps = whole if share is None else steps_of(share, whole)
    recorder = _RECORDER.get()
    if recorder is not None and share is not None and steps:
        recorder.done = StepsDone(steps, whole)
    return steps


class ForecastMod:
    """Adds to each reply what the device expects of its next job.

    One line makes a ClientApp of forecasting devices, which also answers `QUERY`:

        app = ForecastMod().client_app()

    `ClientApp(mods=[ForecastMod()])` adds forecasts to replies too, but Flower hands queries to
    functions alone: the mod answers them only if the app has a function under
    `@app.query("forecast")`, which is never called.

    The record `FORECAST_RECORD` holds:

    - `version`: 1.
    - `p_available`: probability to be online for all of the next `available_s` (half an hour).
    - `p_finish`: probability to be online throughout the next job and done by its deadline.
    - `duration_s`: median of the time from sending to the last byte if nothing interrupts, in s.
    - `training_s`, `reporting_s`, `total_s`: quantiles of times in s, at the `levels`.
    - `share`: of a whole job that the job of the forecast is, if the last one was asked for one.
    - `error`: a sentence, and nothing else, where no forecast could be made.

    The next job is as the last training unless the message states it (`JOB_RECORD`); before
    the first training, and without being told, there are only `p_available` and `available_s`. A
    device without a history forecasts what the forecaster's fleet does. The device's own job times
    enter by calibration, see `fedstale.client.forecasting`; where the server states no work, they
    are also the device's pace.

    The node config, which is set on a device, may say more of it: `journal`, the folder in which
    `fedstale traces record` keeps the readings of this device, such as phone.parquet.journal, where
    its sessions and the load of its processor are read; and `available`, when it can take a job, as
    of `RecordingRules`. Without these counts what messages show; a simulated device has a trace. A
    journal that cannot be read is a line in the device's log.

    Args:
        forecaster: folder of a trained forecaster, or "embedded", "embedded:phones" and the like
            for one that comes with fedstale. One that cannot be read is an `error` in each reply,
            and a line in the device's log; of a simulated device, the job fails.
        enabled_by: key of the run config that switches the mod off where it is false.
        properties: keys of the node config, "battery" and "charging", which the server may know
            and choose devices by (`Candidates.properties`). Others stay on the device.
    """

    def __init__(
        self,
        forecaster: str | Path = "embedded",
        *,
        enabled_by: str | None = None,
        properties: Sequence[str] = (),
    ) -> None:
        self._name, self._enabled_by, self._properties = forecaster, enabled_by, properties
        self._journals: dict[tuple[str, str], JournalHistory] = {}
        self._logged = ""

    def client_app(
        self, mods: list[Mod] | None = None, *, around: Sequence[Mod] = ()
    ) -> "ForecastingApp":
        """Return a new ClientApp with this mod around everything, that answers `QUERY`.

        Args:
            mods: others, which run inside, around each function of the app.
            around: others that run around every message as this one does, inside of it, such as
                `CompressionMod()`. A batch of clients that are trained as one program runs them
                too.
        """
        return ForecastingApp(self, mods, around)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Call the app, and add the forecast to its reply; a query is answered without the app.

        A server that states its release is told this one's, or why they do not work together.
        Around all that, arrays are packed as by `PackMod`.
        """
        return PackMod()(message, context, lambda msg, ctx: self._of_releases(msg, ctx, call_next))

    def _of_releases(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Return the answer, with this release if the server has stated its own."""
        try:
            server = stated_release(message.content)
            fault = server and fault_of_releases(server, __version__)
        except ProtocolError as problem:
            server, fault = "", f"the server {problem}"
        if fault:
            logger.error("refused: %s", fault)
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, fault), reply_to=message)
        reply = self._answered(message, context, call_next)
        if server and not reply.has_error():
            state_release(reply.content, __version__)
        return reply

    def _answered(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Return the app's answer with the forecast, or the answer to a query."""
        is_query = message.metadata.message_type == QUERY
        if self._enabled_by is not None and not context.run_config.get(self._enabled_by, True):
            if is_query:
                return _answer(message, {"error": f"switched off by {self._enabled_by} = false"})
            return call_next(message, context)
        # An app that has the mod, but switched off, imports no forecaster.
        from fedstale.client.device import Device, Machine, array_bytes  # noqa: PLC0415

        device: Device | None = getattr(context, "device", None)
        device = device or Machine(message, context.state)
        arrived = device.read()
        # The app's code may change the message.
        stated = dict(message.content.config_records.get(JOB_RECORD, {}))
        has_share = is_asked(message.content)
        # What travels counts, also where `CompressionMod` is around this mod.
        around = compression.under_way()
        received_bytes = array_bytes(message.content if around is None else around.received)
        reply = _answer(message, {}) if is_query else call_next(message, context)
        if reply.has_error():
            return reply
        if around is not None:
            around.finish(reply)
        try:
            from fedstale.client import forecasting  # noqa: PLC0415 - see above

            recorder = _RECORDER.get()
            done = None if recorder is None else recorder.done
            record = forecasting.record(
                lambda: self._forecaster,
                device,
                arrived,
                message.metadata,
                stated=stated,
                received_bytes=received_bytes,
                reply_bytes=device.reply_bytes(reply.content),
                state=context.state,
                # An app that does not read its share has trained in full.
                share=(1.0 if done is None else done.share) if has_share else None,
                journal=self._journal(context),
            )
        except Exception as problem:
            if isinstance(problem, TraceError) and not isinstance(device, Machine):
                raise
            # Whatever it was, it must not cost a training on a real device.
            record = {"error": self._failed(problem)}
        reply.content[FORECAST_RECORD] = ConfigRecord({**record})
        own: dict[str, Any] = {
            "battery": arrived.battery,
            "charging": arrived.charging,
            **context.node_config,
        }
        if stated := {name: own[name] for name in self._properties if own.get(name) is not None}:
            reply.content[PROPERTIES_RECORD] = ConfigRecord(stated)
        return reply

    @cached_property
    def _forecaster(self) -> "Forecaster":
        from fedstale.traces.forecast import Forecaster, forecaster_folder  # noqa: PLC0415

        return Forecaster.load(forecaster_folder(self._name))

    def _journal(self, context: Context) -> "JournalHistory | None":
        said = context.node_config
        if "journal" not in said:
            return None
        from fedstale.client.journal_history import JournalHistory  # noqa: PLC0415 - see above

        key = str(said["journal"]), str(said.get("available", "online"))
        # What was read of a journal is kept between messages.
        return self._journals.setdefault(key, JournalHistory(*key))

    def _failed(self, problem: Exception) -> str:
        """Log the reason of a missing forecast, once in a row; return the server's version."""
        sentence = f"{type(problem).__name__}: {problem}"
        if sentence != self._logged:
            self._logged = sentence
            logger.error("no forecast: %s", sentence)
        # The server may read what it wrote; anything else may name the device's files.
        if isinstance(problem, ProtocolError):
            return str(problem)
        return f"{type(problem).__name__} on the device, whose log says more"


class ForecastingApp(ClientApp):
    """A ClientApp whose every message goes through a `ForecastMod`; made by it."""

    def __init__(
        self, mod: ForecastMod, mods: list[Mod] | None = None, around: Sequence[Mod] = ()
    ) -> None:
        super().__init__(mods=mods)
        self._around: list[Mod] = [mod, *around]

    def around(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run around every message, also around those that the app has no function for."""
        for mod in reversed(self._around):
            call_next = _through(mod, call_next)
        return call_next(message, context)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        return self.around(message, context, super().__call__)


class PackMod:
    """Unpacks what a server has packed, and packs the reply; the app sees neither.

    It must be the first of the mods, so that it is the first to see a message and the last to see
    a reply, around mods that change arrays, such as those for privacy:

        app = ClientApp(mods=[PackMod(), fixedclipping_mod])

    `ForecastMod` does the same, and needs no other. The first message to a node comes as it is,
    and the reply goes as it is, with the statement that this node can unpack. A server of fedstale
    packs from then on, and its messages are answered alike; any other server ignores the
    statement. A simulation packs nothing, and no statement is made there.
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Unpack, call the app, pack; what cannot be unpacked is answered with an error."""
        is_packed = can_unpack(message.content)
        try:
            if is_packed:
                message.content = unpack(message.content)
        except ProtocolError as problem:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"{problem}"), reply_to=message)
        with StepRecorder() as recorder:
            reply = call_next(message, context)
        if recorder.done is not None and not reply.has_error():
            reply.content[WORK] = recorder.done.record()
        # A simulated node has a device.
        if reply.has_error() or hasattr(context, "device"):
            return reply
        reply.content = (pack if is_packed else advertised)(reply.content)
        return reply


class CompressionMod:
    """Answers in the format that a server asks for, and reads models in formats; the app sees none.

    It belongs first, with `ForecastMod` or `PackMod` beside it in either order, around mods that
    change arrays, such as those for privacy:

        app = ClientApp(mods=[CompressionMod(), ForecastMod()])
        app = ForecastMod().client_app(around=[CompressionMod()])

    Large arrays of a reply then go as changes of what was received; see `Format` for which server
    asks for that. What rounding leaves out is kept in the node's Context and goes into the next
    reply. It also packs, as `PackMod` does. To a server that asks for nothing it adds nothing.
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Decode, call the app, encode; what cannot be read is answered with an error."""
        return PackMod()(message, context, _through(compression.compressed, call_next))


def _through(mod: Mod, call_next: ClientAppCallable) -> ClientAppCallable:
    """Return a mod around what comes after it."""
    return lambda message, context: mod(message, context, call_next)


def _answer(message: Message, record: "Record") -> Message:
    return Message(RecordDict({FORECAST_RECORD: ConfigRecord({**record})}), reply_to=message)
