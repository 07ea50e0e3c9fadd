"""What is wrong with a SuperLink or a SuperNode, in one sentence each.

`check_health` tries to reach a SuperLink. `explain` reads the log of a Flower process.
"""

import re
import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx

from fedstale.deployment.commands import Address
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import check_private

_LIMIT_S = 5.0
_BEHIND_DOORS = ("/v1/fleet/pull-messages", "/v1/control/list-nodes")
# In the order of looking: what says most comes first.
_MEANINGS = (
    (
        r"\[code: 2004\]|Failed to activate SuperNode",
        "the SuperLink does not let this node in: register its public key (flwr supernode "
        "register KEY.pub), or, if the node was killed a moment ago, start it again in two "
        "minutes, when the SuperLink has noticed",
    ),
    (
        r"\[code: 2001\]|SuperNode authentication is enabled",
        "the SuperLink accepts registered nodes only: make a key, register it, and start the node "
        "with --auth-supernode-private-key",
    ),
    (
        r"Hostname mismatch|IP address mismatch",
        "the SuperLink's certificate is for another name: connect to a name that is in it",
    ),
    (
        r"certificate has expired|certificate is not yet valid",
        "the SuperLink's certificate is not valid today: renew it, or set this machine's clock",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "the SuperLink's certificate was not signed by the authority in --root-certificates: copy "
        "ca.crt from the SuperLink's machine",
    ),
    (
        # "SSL/TLS handshake error detected." comes a moment before the line with the reason, so
        # it says nothing yet of a log that is still being written.
        r"\[SSL\b",
        "the SuperLink does not speak TLS, or something else listens at its port: check both",
    ),
    (
        r"address already in use",
        "its port is taken: give another one with --port",
    ),
    (
        r"Name or service not known|nodename nor servname|Temporary failure in name resolution",
        "the SuperLink's name is unknown: check --superlink and the DNS",
    ),
    (
        r"Connection refused",
        "nothing listens at the SuperLink's address: check --superlink, and that it runs",
    ),
    (
        r"Path argument `(?P<what>[^`]+)` does not point to a file",
        "{what} names a file that does not exist",
    ),
    (
        r"No module named '(?P<what>[^']+)'",
        "the app needs the package {what}, which is not installed where this ran",
    ),
    (
        r'/v1/fleet/\S+ HTTP/1\.1" 401',
        "the SuperLink rejected the signature of a node, whose clock is more than 5 s ahead of the "
        "SuperLink's or 5 min behind it: set the node's clock",
    ),
    (
        r"SuperNode terminated gracefully",
        "the SuperNode was stopped, or the SuperLink rejected its signature because of its clock, "
        "which must not be more than 5 s ahead of the SuperLink's or 5 min behind it: set this "
        "machine's clock",
    ),
    (
        r"`--insecure` was set(?s:.*)Connection attempt failed",
        "the SuperLink does not answer plain HTTP: leave out --insecure and give "
        "--root-certificates, or check that it runs",
    ),
    (
        r"Connection attempt failed",
        "the SuperLink does not answer, or none whose clock is wrong: check --superlink, that the "
        "SuperLink runs, and this machine's clock",
    ),
)


# The same, of what one sees who tries to reach a SuperLink at an address.
_UNREACHED = (
    (
        r"timed out",
        "{at} does not answer within {limit_s:g} s: check the address and firewalls",
    ),
    (
        r"mismatch|certificate is not valid for",
        "the certificate of the SuperLink at {at} is not for the name {host!r}: use a name that is "
        "in it, or make one with this name as subjectAltName",
    ),
    (
        r"verify failed: (?P<what>.*(?:expired|not yet valid).*?)(?: \(_ssl|$)",
        "the certificate of the SuperLink at {at} is not valid today ({what}): renew it, or set "
        "this machine's clock",
    ),
    (
        r"verify failed: (?P<what>.*?)(?: \(_ssl|$)",
        "the certificate of the SuperLink at {at} was not signed by the given authority ({what}): "
        "copy the authority's ca.crt from the SuperLink's machine",
    ),
    (
        r"SSL",
        "what listens at {at} does not speak TLS: check the port, or connect with insecure = true "
        "if the SuperLink was started with --insecure",
    ),
    (
        r"Name or service not known|nodename nor servname|name resolution|No address associated",
        "the name {host!r} of the SuperLink is unknown: check its spelling and the DNS",
    ),
    (
        r"Connection refused",
        "nothing listens at {at}: start the SuperLink, or check host and port (it listens at "
        "127.0.0.1:8000 unless --host and --port say otherwise)",
    ),
)


def explain(log: str) -> str | None:
    """Return what went wrong, or None if the log tells of nothing that is known here.

    Example:
        >>> explain("[Errno 111] Connection refused").split(":")[0]
        "nothing listens at the SuperLink's address"
    """
    return _meaning(_MEANINGS, log)


def _meaning(table: Sequence[tuple[str, str]], text: str, **about: object) -> str | None:
    for pattern, meaning in table:
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None:
            return meaning.format(**about, **found.groupdict())
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
            _meaning(_UNREACHED, cause, at=at, host=at.host, limit_s=_LIMIT_S)
            or (plain if insecure else f"{at} cannot be reached: {cause}")
        ) from None
    if not is_one:
        raise FedstaleError(
            f"something at {at} answers, but is no SuperLink (HTTP status {status}): check the "
            "port, and whether it is an operators' door, which needs client-certificate"
        )


def show_certificate(context: ssl.SSLContext, certificate: Path) -> None:
    """Let connections of a context show an operator's certificate.

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
