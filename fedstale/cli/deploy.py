"""`fedstale deploy`, `node` and `flwr`: what servers, operators and devices start and need."""

import json
import os
import shutil
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstale.cli.output import UNITS_S, AsJson, amount, one_sentence, say
from fedstale.errors import ConfigError, FedstaleError

if TYPE_CHECKING:
    from pwd import struct_passwd

# Whatever these commands do not know is Flower's.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

_ASKS_AGAIN_S = 10.0

app = typer.Typer(help="Set up a server for real devices, and start its parts.")


@app.command(
    epilog="Example: fedstale deploy init my-server --host fl.example.org "
    "--operator alice=run,register"
)
@one_sentence()
def init(
    folder: Annotated[Path, typer.Argument(help="New folder for all that the machines need.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address by which devices reach the server; several.")
    ],
    operator: Annotated[
        list[str],
        typer.Option(help="NAME, who may look, or NAME=run,register; several."),
    ],
    days: Annotated[int, typer.Option(help="Until the certificates end.", min=1)] = 365,
    devices: Annotated[str, typer.Option(help="Where the devices' door listens.")] = "0.0.0.0:8000",
    operators: Annotated[
        str, typer.Option(help="Where the operators' door listens.")
    ] = "0.0.0.0:8001",
    runtime: Annotated[
        str, typer.Option(help="Where the door of ServerApps listens.")
    ] = "127.0.0.1:8002",
    socket: Annotated[
        Path, typer.Option(help="Unix socket of the SuperLink, in a folder of its own.")
    ] = Path("/run/flower-superlink/superlink.sock"),
    as_json: AsJson = False,
) -> None:
    """Write a folder for the server, one for a device and one for each operator.

    In each are certificates, units and a script that puts them in place. Nothing is started, and
    the same command once more changes nothing. The server is reached by devices and operators at
    different ports, and its SuperLink by nobody.
    """
    from fedstale.deployment import SOCKET, Address, Doors, write_server

    doors = Doors(
        devices=Address.parse(devices),
        operators=Address.parse(operators),
        runtime=Address.parse(runtime),
        superlink=socket,
    )
    named = dict(map(_roles, operator))
    write_server(folder, doors, host, named, days=days)
    at = f"root@{host[0]}"
    start = f"scp -r {folder}/server {at}: && ssh {at} sh server/install.sh"
    say(
        f"{folder} is ready; next, in this order:\n"
        f"  the server:   {start if socket == SOCKET else 'compose.yaml of docs/deploy'}\n"
        f"  an operator:  sh {folder}/operators/{next(iter(named))}/install.sh\n"
        f"  each device:  scp -r {folder}/device root@DEVICE: && "
        "ssh root@DEVICE sh device/install.sh > DEVICE.pub\n"
        "                fedstale flwr supernode register DEVICE.pub mine\n"
        f"  to a safe place: {folder}/ca.key, which signs whom the server trusts",
        folder,
        as_json=as_json,
    )


@app.command(
    epilog="Example: fedstale deploy run my_app mine --checkpoints /var/lib/flower-app/run-1"
)
@one_sentence()
def run(
    app_folder: Annotated[
        Path, typer.Argument(metavar="APP", help="Folder of a Flower app, or a built-in one.")
    ],
    link: Annotated[
        str, typer.Argument(metavar="SUPERLINK", help="Name of a SuperLink in config.toml.")
    ],
    checkpoints: Annotated[
        str, typer.Option(help="Folder on the server, where ServerApps may write.")
    ],
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides, as flwr run takes them.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Run an app, or follow the run of it that goes on; both go on from its checkpoints.

    The app reads `checkpoints` and `resume` from its run config. Exit code 0 if the run has
    completed or an operator has stopped it, else 2: a unit with Restart=on-failure starts this
    again, and the next run goes on.
    """
    import httpx

    from fedstale.deployment import Control, commands, operators_side, run_streamed
    from fedstale.flower import command_line
    from fedstale.simulation import FlowerApp

    app_folder = FlowerApp.find(app_folder).directory
    if "'" in checkpoints or not Path(checkpoints).is_absolute():
        raise ConfigError(
            f"checkpoints = {checkpoints!r}: expected an absolute path without quotes"
        )
    config = f"{run_config} checkpoints='{checkpoints}' resume='{checkpoints}'".strip()

    def show(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    control = Control(*operators_side(link))
    while True:
        try:
            run_id = control.unfinished(app_folder, config)
            break
        except httpx.HTTPError as problem:
            if isinstance(problem, httpx.HTTPStatusError) and problem.response.is_client_error:
                raise FedstaleError(f"the SuperLink {link} refuses: {problem}") from None
            show(f"the SuperLink {link} does not answer, and is asked again: {problem}")
            time.sleep(_ASKS_AGAIN_S)
    if run_id is not None:
        show(f"following run {run_id}, which goes on")
    else:
        environment = commands.environment(command_line.flower_home())
        run_id, _ = run_streamed(app_folder, link, config, environment=environment, show=show)
    if run_id is None:
        raise FedstaleError("flwr run started nothing: see above")
    status, details = control.ended(run_id)
    how = status.removeprefix("finished:")
    if how not in {"completed", "stopped"}:
        raise FedstaleError(f"run {run_id} {how}: {details}: the same command goes on from it")
    show(f"run {run_id} {how}")
    if as_json:
        print(json.dumps({"run_id": run_id, "status": how}))


@app.command(epilog="Example: fedstale deploy model /var/lib/flower-app/run-1 model.safetensors")
@one_sentence()
def model(
    checkpoints: Annotated[Path, typer.Argument(help="Of a run: the folder, or a file in it.")],
    out: Annotated[Path, typer.Argument(help="Where the model goes, as model.safetensors.")],
    as_json: AsJson = False,
) -> None:
    """Write the model of a run's latest checkpoint, also while the run goes on."""
    from fedstale.runs import model_bytes
    from fedstale.strategies.server import Versions, read_checkpoint
    from fedstale.traces.io import replacing

    state = read_checkpoint(checkpoints)
    if "versions" not in state:
        raise ConfigError(
            f"checkpoints = {str(checkpoints)!r}: expected those of a strategy of fedstale on real "
            "devices; a simulation writes model.safetensors into its run folder"
        )
    version = state["versions"]["version"]
    with replacing(out) as file:
        file.write(model_bytes(Versions.model_in(state["versions"])))
    say(f"wrote version {version} to {out}", out, as_json=as_json, version=version)


@app.command(
    context_settings=PASSED_ON,
    epilog="Example: fedstale deploy superlink --socket /run/flower-superlink/superlink.sock",
)
@one_sentence()
def superlink(
    context: typer.Context,
    socket: Annotated[
        Path | None, typer.Option(help="Unix socket to listen at in place of a port.")
    ] = None,
    record_bytes: Annotated[
        int, typer.Option(help="Most bytes of one record of a reply, but arrays.", min=1)
    ] = 1_000_000,
    reply_objects: Annotated[
        int, typer.Option(help="Most records, arrays and their pieces of 5 MB in a reply.", min=1)
    ] = 20_000,
    reply_bytes: Annotated[
        int | None,
        typer.Option(help="Most bytes of a reply; four times what its run sends, and 1 MB.", min=1),
    ] = None,
    node_replies_per_hour: Annotated[
        int, typer.Option(help="Most replies of a node in an hour.", min=1)
    ] = 3600,
    node_bytes_per_hour: Annotated[
        int, typer.Option(help="Most bytes that a node may send in an hour.", min=1)
    ] = 40_000_000_000,
    hold: Annotated[
        str, typer.Option(help="Longest that a node's request for a message is held, 0s to 25s.")
    ] = "20s",
) -> None:
    """Run flower-superlink, with its options, behind a gate for what devices send."""
    from fedstale.deployment import superlink

    quotas = superlink.Quotas(
        record_bytes=record_bytes,
        reply_objects=reply_objects,
        reply_bytes=reply_bytes,
        node_replies_per_hour=node_replies_per_hour,
        node_bytes_per_hour=node_bytes_per_hour,
    )
    superlink.run(context.args, socket, quotas, hold_s=amount("hold", hold, UNITS_S))


@app.command(
    context_settings=PASSED_ON,
    epilog="Example: fedstale deploy superexec --user flower-app --insecure "
    "--runtime-api-address 127.0.0.1:9091",
)
@one_sentence()
def superexec(
    context: typer.Context,
    user: Annotated[
        str, typer.Option(help="Whom it becomes after it has read its secret; needs root.")
    ] = "",
    secret: Annotated[
        Path | None,
        typer.Option("--superexec-auth-secret-file", help="The SuperLink's file, of mode 0600."),
    ] = None,
) -> None:
    """Run flower-superexec, with its options; ServerApps run as another user.

    Such a ServerApp can read neither the secret nor what belongs to the SuperLink.
    """
    from fedstale.files import PRIVATE_UMASK, check_private
    from fedstale.flower import command_line, features, supernode

    account = account_of(user) if user else None
    if secret:
        check_private("--superexec-auth-secret-file", secret)
    # What ServerApps leave, checkpoints above all, is their user's alone.
    os.umask(PRIVATE_UMASK)

    given = ["--superexec-auth-secret-file", str(secret)] if secret else []
    sys.argv = ["flower-superexec", *given, *context.args]
    if account is None:
        command_line.program("flower-superexec")()
        return
    features.require("ServerApps of another user")

    def become() -> None:
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        # From here on Linux closes this process's memory, and the secret, to others of the user.
        os.setuid(account.pw_uid)
        if not (shutil.which("flwr-serverapp") and os.access(sys.executable, os.X_OK)):
            raise ConfigError(
                f"user = {user!r}: flwr-serverapp is not in its PATH, or it may not run it: "
                "expected an environment that all may enter, such as /opt/fedstale, not "
                f"{sys.prefix}"
            )
        os.environ["HOME"] = account.pw_dir

    supernode.run_program_superexec(become)


@one_sentence()
def node(context: typer.Context) -> None:
    """Run flower-supernode, with its options; messages get forks in place of new interpreters."""
    from fedstale.deployment import node as supernode

    raise typer.Exit(supernode.run(context.args))


@one_sentence()
def flwr(context: typer.Context) -> None:
    """Run flwr, with its arguments; it shows the certificate that config.toml names."""
    from fedstale.app_folder import built_in_apps
    from fedstale.deployment import show_certificate, superlinks
    from fedstale.flower import command_line, features
    from fedstale.simulation import FlowerApp

    words = context.args
    # A built-in app, unless a folder has its name.
    if words[:1] == ["run"] and words[1:2] and words[1] in built_in_apps():
        words = [words[0], str(FlowerApp.find(words[1]).directory), *words[2:]]

    def shown(address: str, verify: Any) -> Any:
        for link in superlinks().values():
            if link.get("address") == address and "client-certificate" in link:
                if not isinstance(verify, ssl.SSLContext):
                    ca = verify if isinstance(verify, str) else None
                    verify = ssl.create_default_context(cafile=ca)
                show_certificate(verify, Path(link["client-certificate"]).expanduser())
                break
        return verify

    if features.has("certificates of the flwr command"):
        command_line.verify_with(shown)
    sys.argv = ["flwr", *words]
    command_line.program("flwr")()


def account_of(user: str) -> "struct_passwd":
    """Return the account as whom ServerApps are to run.

    Raises:
        ConfigError: there is none, it is root's, or this process cannot become it.
    """
    import pwd

    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"user = {user!r}: this machine has no such user") from None
    if account.pw_uid == 0:
        raise ConfigError(f"user = {user!r}: expected another one than root")
    if os.geteuid() != 0:
        raise ConfigError(f"user = {user!r}: only root can start ServerApps as another user")
    return account


def _roles(text: str) -> tuple[str, list[str]]:
    """Return an operator's name and roles.

    Example:
        >>> _roles("alice=run,register"), _roles("bob")
        (('alice', ['run', 'register']), ('bob', []))
    """
    name, _, roles = text.partition("=")
    return name, [role for role in roles.split(",") if role]
