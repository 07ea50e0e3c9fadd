"""What is wrong with a SuperLink or a SuperNode, in one sentence each.

`check_health` tries to reach a SuperLink. `explain` reads the log of a Flower process.
What patterns mean is in diagnosis.toml.
"""

import re
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from fedstale.deployment.commands import Address
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import check_private

_LIMIT_S = 5.0
_BEHIND_DOORS = ("/v1/fleet/pull-messages", "/v1/control/list-nodes")
_MEANINGS: Mapping[str, Sequence[Mapping[str, str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Patterns in logs and in errors of connecting, and what each means."""


def explain(log: str) -> str | None:
    """Explain a log's failure, None if it tells of nothing that is known here.

    Example:
        >>> explain("[Errno 111] Connection refused").split(":")[0]
        "nothing listens at the SuperLink's address"
    """
    return _meaning("log", log)


def _meaning(table: str, text: str, **about: object) -> str | None:
    for row in _MEANINGS[table]:
        found = re.search(row["pattern"], text, re.IGNORECASE)
        if found is not None:
            return row["meaning"].format(**about, **found.groupdict())
    return None


def is_healthy(at: Address, ca: Path | None) -> bool:
    """Return whether a SuperLink answers at an address."""
    try:
        check_health(at, ca)
    except FedstaleError:
        return False
    return True


def check_health(
    at: Address, ca: Path | None, *, insecure: bool = False, certificate: Path | None = None
) -> None:
    """Check that a SuperLink can be reached and is healthy.

    Args:
        at: where it should be.
        ca: certificate of its authority; None for those that the system trusts.
        insecure: without TLS.
        certificate: an operator's, with its key, for the operators' door of a proxy.

    Raises:
        ConfigError: the certificate file cannot be used.
        FedstaleError: it cannot be reached; the text says why and what to do.
    """
    scheme, verify = ("http", False) if insecure else ("https", trusting(ca))
    if certificate is not None and isinstance(verify, ssl.SSLContext):
        show_certificate(verify, certificate)
    try:
        # A proxy of this user's is not how SuperNodes go.
        with httpx.Client(
            base_url=f"{scheme}://{at}", verify=verify, trust_env=False, timeout=_LIMIT_S
        ) as client:
            status = client.get("/health").status_code
            # Behind a proxy there is no such path. A SuperLink takes no text, and says so first.
            is_one = status == httpx.codes.OK or any(
                client.post(path, content="-", headers={"Content-Type": "text/plain"}).status_code
                == httpx.codes.UNSUPPORTED_MEDIA_TYPE
                for path in _BEHIND_DOORS
            )
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        cause = str(problem) or type(problem).__name__
        plain = f"{at} does not answer plain HTTP ({cause}): a SuperLink with TLS needs ca.crt"
        raise FedstaleError(
            _meaning("connecting", cause, at=at, host=at.host, limit_s=_LIMIT_S)
            or (plain if insecure else f"{at} cannot be reached: {cause}")
        ) from None
    if not is_one:
        raise FedstaleError(
            f"something at {at} answers, but is no SuperLink (HTTP status {status}): check the "
            "port, and whether it is an operators' door, which needs client-certificate"
        )


def show_certificate(context: ssl.SSLContext, certificate: Path) -> None:
    """Load an operator's certificate, for connections of a context to show.

    Args:
        context: of a client.
        certificate: PEM file with the certificate and its key.

    Raises:
        ConfigError: the file cannot be used, or others may read the key in it.
    """
    check_private("client-certificate", certificate)
    try:
        context.load_cert_chain(certificate)
    except OSError as problem:
        raise ConfigError(
            f"client-certificate = {str(certificate)!r}: {problem}; expected a PEM file with an "
            "operator's certificate and key, from fedstale deploy init"
        ) from None


def trusting(ca: Path | None) -> ssl.SSLContext:
    """Return the context of a client that trusts an authority; None: those of the system.

    Raises:
        ConfigError: the file is no certificate.
    """
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (FileNotFoundError, ssl.SSLError) as problem:
        fault = ": there is no such file;"
        if isinstance(problem, ssl.SSLError):
            fault = f" is no PEM certificate ({problem.reason}):"
        raise ConfigError(
            f"root-certificates = {str(ca)!r}{fault} expected the certificate of the authority "
            "that signed the SuperLink's"
        ) from None
