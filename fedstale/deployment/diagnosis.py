"""What a Flower process means by the last lines of its log, in one sentence each."""

import re

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
        "the SuperLink refused the signature of a node, whose clock is more than 5 s ahead of the "
        "SuperLink's or 5 min behind it: set the node's clock",
    ),
    (
        r"SuperNode terminated gracefully",
        "the SuperNode was stopped, or the SuperLink refused its signature because of its clock, "
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
        "the SuperLink does not answer: check --superlink, and that the SuperLink runs",
    ),
)


def explain(log: str) -> str | None:
    """Return what went wrong, or None if the log tells of nothing that is known here.

    Example:
        >>> explain("[Errno 111] Connection refused").split(":")[0]
        "nothing listens at the SuperLink's address"
    """
    for pattern, meaning in _MEANINGS:
        found = re.search(pattern, log, re.IGNORECASE)
        if found is not None:
            return meaning.format(**found.groupdict())
    return None
