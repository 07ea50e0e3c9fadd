"""Flower's programs on a node, SuperNode, SuperExec and ClientApp, and the changes to them.

All names here were read in Flower 1.41 to 1.43. Flower's programs find their parts by name in their
own modules, and a part is replaced there before its program starts. Each name is imported where it
is used: a SuperNode stays in a device's memory, and needs nothing of what a SuperExec does.
"""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstale.errors import ConfigError
from fedstale.flower.command_line import program

if TYPE_CHECKING:
    from fastapi import FastAPI

CLIENT_APP = "flwr-clientapp"
"""Type of a task that is a message for a ClientApp, and name of its process."""


def hold_tasks(
    api: "Callable[[FastAPI], FastAPI]",
    pauses: object,
    is_whole: Callable[[], None],
    at_exit: Callable[[], None],
) -> None:
    """Change how the parts of a SuperNode, in this process, wait for each other.

    Args:
        api: returns what is served in place of Flower's own Runtime API.
        pauses: stands for Python's `time` in the SuperNode's loop, which sleeps until a reply is
            there.
        is_whole: called when a message has come with all its objects, before the loop waits for the
            reply.
        at_exit: called when the SuperNode ends, before it waits for its API to end.
    """
    from flwr.supercore.exit import add_exit_handler
    from flwr.supernode.main import create_app
    from flwr.supernode.start_client_internal import start_client_internal

    def serving(made: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(made)(lambda *given, **named: api(made(*given, **named)))

    def first(push: Callable[..., None]) -> Callable[..., None]:
        @wraps(push)
        def both(*given: object, **named: object) -> None:
            is_whole()
            push(*given, **named)

        return both

    _replace(create_app, "create_app", serving)
    _replace(start_client_internal, "time", lambda _: pauses)
    _replace(start_client_internal, "_push_messages", first)
    add_exit_handler(at_exit, run_before_force_exit=True)


def throw_away_ended() -> None:
    """Make a SuperNode, in this process, drop a message of a run that ends meanwhile."""
    from flwr.supernode.start_client_internal import start_client_internal

    _replace(start_client_internal, "_pull_and_store_message", whole_or_not)


def whole_or_not(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a pull of the SuperNode's loop after which a message is there whole, or not at all.

    Args:
        pull: Flower's, which takes its steps by name.
    """

    @wraps(pull)
    def pulled(**named: Any) -> int | None:
        noted = _Noted(named["state"], named["receive"])
        steps = {
            step: noted.until_ended(named[step])
            for step in ("pull_object", "confirm_message_received")
        }
        run_id = pull(**named | {"state": noted, "receive": noted.receive} | steps)
        if noted.has_ended:
            noted.undo(named["object_store"])
        return run_id

    return pulled


class _Noted:
    """A SuperNode's state in one pull, with the steps that may be undone.

    Flower ends a pull quietly when a step of it finds that the run has ended, whichever it is: it
    knows of no message that it would have to throw away. From 1.43 on the last step comes in a
    `finally`, where no other error may be raised: the SuperNode would end.
    """

    def __init__(self, state: Any, receive: Callable[[], Any]) -> None:
        self._state, self._receive = state, receive
        self._message: Any = None
        self._task_id: int | None = None
        self.has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def receive(self) -> Any:
        found = self._receive()
        self._message = found and found[0]
        return found

    def create_task(self, **given: Any) -> int | None:
        self._task_id = self._state.create_task(**given)
        return self._task_id

    def until_ended(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that notes when the run has ended."""
        from flwr.supercore.run import RunNotRunningException

        @wraps(step)
        def done(*given: object) -> Any:
            try:
                return step(*given)
            except RunNotRunningException:
                self.has_ended = True
                raise

        return done

    def undo(self, objects: Any) -> None:
        """Throw the message away, its objects and its task."""
        about = self._message.metadata
        # Where messages are up to 1.42. Later ones leave it empty, or have it no more.
        if hasattr(self._state, "delete_messages"):
            self._state.delete_messages(message_ids=[about.message_id])
        # Where they are from 1.43 on. There may be an error, too, that Flower answers itself.
        if hasattr(self._state, "cancel_messages"):
            self._state.cancel_messages(run_id=about.run_id)
        objects.delete(about.message_id)
        if self._task_id is not None:
            self._state.finish_task(self._task_id, "failed", "its run has ended")


def run_superexec(
    executor: Callable[[Any], Any], address: str, root_certificates: str | None
) -> None:
    """Run what flower-superexec runs, until it ends, with another executor.

    Args:
        executor: returns what starts ClientApps, given Flower's own `SubprocessExecutor`.
        address: of the SuperNode's Runtime API.
        root_certificates: file, if it is not plain.
    """
    from flwr.supercore.superexec.run_superexec import run_superexec as flowers

    _replace(
        flowers,
        "get_executor",
        lambda made: lambda *given, **named: executor(made(*given, **named)),
    )
    flowers(
        runtime_api_address=address,
        insecure=root_certificates is None,
        root_certificates_path=root_certificates,
    )


def launched(problem: str | None = None) -> Any:
    """Return an executor's answer: that the ClientApp started, or the reason against it."""
    from flwr.supercore.superexec.executor import LaunchResult

    return LaunchResult.accepted() if problem is None else LaunchResult.failed(problem)


def run_client_app(
    spec: Any, pulling: Callable[..., object], pushing: Callable[..., object]
) -> None:
    """Answer one message as the process flwr-clientapp does.

    Args:
        spec: what a SuperExec tells of it, with the fields of Flower's `ExecutionSpec`.
        pulling: called in place of the step that pulls the message, with that step and whatever it
            is given; returns what the step returns.
        pushing: the same of the step that pushes the reply.
    """
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    _replace(run_clientapp, "pull_task_input", partial(partial, pulling))
    _replace(run_clientapp, "push_message", partial(partial, pushing))
    path = None if spec.insecure else spec.root_certificates_path
    run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=None if path is None else Path(path).expanduser().read_bytes(),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=spec.runtime_dependency_install,
    )


def forget_exit_handlers() -> None:
    """Remove the exit handlers that this process, a fork, has from its parent."""
    from flwr.supercore.exit.exit_handler import registered_exit_handlers

    registered_exit_handlers.clear()


def run_program_superexec(prepare: Callable[[], None]) -> None:
    """Run flower-superexec, with the options in `sys.argv`.

    Args:
        prepare: called when it has read its options and its secret, before all else.

    Raises:
        ConfigError: it would not be called.
    """
    flowers = program("flower-superexec")
    if "run_superexec" not in flowers.__code__.co_names:
        raise ConfigError("flower-superexec: expected one that runs run_superexec")

    def prepared(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def both(**options: object) -> None:
            prepare()
            run(**options)

        return both

    _replace(flowers, "run_superexec", prepared)
    flowers()


def _replace(function: Callable[..., Any], name: str, make: Callable[[Any], Any]) -> None:
    """Replace a global of a Flower function by the result of `make` on it."""
    parts = function.__globals__
    parts[name] = make(parts[name])
