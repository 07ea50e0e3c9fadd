"""A device lets itself in with a one-time token, and its key never leaves it.

The device makes a key, and sends the public half, its name and the token to the devices' door, with
a signature that says that it holds the other half. This file is the device's side, and what both
sides agree on; it needs no more than a device has.
"""

import re
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from fedstale.deployment.commands import Address, write_node_key
from fedstale.deployment.diagnosis import check_health, trusting
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import check_private, make_private

JOIN_PATH = "/fedstale/enrol"
"""Where a SuperLink of `fedstale deploy superlink` takes tokens."""
NAME = re.compile(r"(?=.*[A-Za-z._-])[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
"""What a device may call itself, as hosts are called: no number alone, since ids are numbers."""
SIGNED_WITH = ec.ECDSA(SHA256())
ID_LENGTH = 12
"""Characters of a token's hash that name it in the log."""

_LIMIT_S = 30.0
_WAITS_S = (2.0, 4.0, 8.0, 16.0, 30.0)
"""Before each further try, when many join at once."""


def digest_of(token: str) -> str:
    """Return all that a server keeps of a token."""
    return sha256(token.encode()).hexdigest()


def token_id(token: str) -> str:
    """Return by what name the log knows a token.

    Example:
        >>> token_id("secret")
        '2bb80d537b1d'
    """
    return digest_of(token)[:ID_LENGTH]


def statement(digest: str, public_key: str, name: str) -> bytes:
    """Return what the owner of a key signs to join with it."""
    return "\n".join(("fedstale join", digest, public_key, name)).encode()


def asking(token: str, key: ec.EllipticCurvePrivateKey, name: str) -> dict[str, str]:
    """Return what the owner of a key sends to join with a token."""
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    signature = b64encode(key.sign(statement(digest_of(token), public, name), SIGNED_WITH)).decode()
    return {"token": token, "public_key": public, "name": name, "signature": signature}


def join(
    at: Address,
    ca: Path,
    token: str,
    key: Path,
    name: str,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Register this device as a node; the same again, with the same key, if it was cut short.

    Args:
        at: the devices' door.
        ca: certificate of the authority that the server's certificate is checked against.
        token: from `fedstale deploy tokens`.
        key: file of the private key; it is made, with a private folder, if it is not there.
        name: of the node, which no other node has.
        say: is told why it waits.

    Returns:
        The node's id.

    Raises:
        ConfigError: the name or the key cannot be, or others may read the key.
        FedstaleError: the server cannot be reached, is another one, or refuses.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name = {name!r}: expected up to 63 letters, digits, dots, hyphens or underscores, "
            "and no number"
        )
    check_health(at, ca)
    answer = _post(at, ca, asking(token, _key(key), name), say)
    found = None
    with suppress(ValueError):
        found = answer.json()
    if not isinstance(found, dict):
        found = {}
    if answer.is_success and str(found.get("node_id")).isdecimal():
        return int(found["node_id"])
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise FedstaleError(f"{at} takes no tokens: expected the devices' door of a server")
    reason = found.get("detail") or f"status {answer.status_code}"
    raise FedstaleError(f"{at} does not let this device in: {reason}")


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's key, which is made if it is not there."""
    try:
        make_private(path.parent)
        check_private("key", path, folder=True)
        if not path.exists():
            write_node_key(path)
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"key = {str(path)!r} cannot be used: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"key = {str(path)!r}: expected one of a NIST curve")
    return key


def _post(
    at: Address, ca: Path, asked: dict[str, str], say: Callable[[str], None]
) -> httpx.Response:
    """Return the server's answer; while it has no time, wait and ask again."""
    # A proxy of this user's would not be where SuperNodes go.
    with httpx.Client(
        base_url=f"https://{at}", verify=trusting(ca), trust_env=False, timeout=_LIMIT_S
    ) as client:
        try:
            for wait_s in _WAITS_S:
                answer = client.post(JOIN_PATH, json=asked)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return answer
                say(f"{at} is busy: trying again in {wait_s:g} s")
                time.sleep(wait_s)
            return client.post(JOIN_PATH, json=asked)
        except httpx.HTTPError as problem:
            cause = str(problem) or type(problem).__name__
            raise FedstaleError(
                f"{at} breaks off ({cause}): the same command, with the same key, goes on"
            ) from None
