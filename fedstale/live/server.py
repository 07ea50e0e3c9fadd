"""Serves pages of a run: read-only, to this machine alone unless a token is set.

The standard library's HTTP server in threads of its own. Four files and one JSON document; nothing
is fetched from anywhere else, and nothing that a browser sends is used but the path and the token.
"""

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from fedstale.errors import ConfigError
from fedstale.live.board import Board

PORT = 8760
_TOKEN_BYTES = 18
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_FILES = {
    "/": ("fedstale.live", "page.html", "text/html"),
    "/live.js": ("fedstale.live", "live.js", "text/javascript"),
    "/page.js": ("fedstale.reports", "page.js", "text/javascript"),
    "/page.css": ("fedstale.reports", "page.css", "text/css"),
    "/chart.js": ("fedstale.reports", "vendor/chart.js", "text/javascript"),
}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "8760", "HOST:8760" or "[::1]:8760"; port 0 takes a free one.

    Raises:
        ConfigError: it is none of these.

    Example:
        >>> parse_address("8760")
        ('127.0.0.1', 8760)
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ConfigError(f"live-at = {text!r}: expected a port, or HOST:PORT such as 0.0.0.0:8760")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextmanager
def serving(
    board: Board, host: str = "127.0.0.1", port: int = PORT, *, or_any: bool = False
) -> Iterator[str]:
    """Serve a board while the block runs; yields the address to open.

    Args:
        board: what is shown.
        host: address to listen at. Any but the loopback's makes a token, which is in the address
            that is yielded and without which no data is given out.
        port: TCP port; 0 takes a free one.
        or_any: whether a free port will do as well where another program has this one.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    token = "" if is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES)
    handler = type("BoardHandler", (_BoardHandler,), {"board": board, "token": token})
    shown = "HOST" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    with listening(handler, host, port, setting="live-at", or_any=or_any) as bound:
        query = f"?token={token}" if token else ""
        yield f"http://{shown}:{bound}/{query}"


@contextmanager
def listening(
    handler: "type[LocalHandler]", host: str, port: int, *, setting: str, or_any: bool = False
) -> Iterator[int]:
    """Answer requests in threads of their own while the block runs; yields the port.

    Args:
        handler: of a request.
        host: address to listen at.
        port: TCP port; 0 takes a free one.
        setting: that the address comes from, for errors.
        or_any: whether a free port will do as well where another program has this one.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("OwnServer", (ThreadingHTTPServer,), {"address_family": family})
    why: str | None = None
    for candidate in (port, 0) if or_any else (port,):
        try:
            server = kind((host, candidate), handler)
            break
        except OSError as problem:
            why = problem.strerror
    else:
        raise ConfigError(
            f"{setting} = {f'{host}:{port}'!r} cannot be listened at ({why}): "
            "expected an address of this machine with a free port, or port 0 for any"
        )
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="fedstale-live", daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class LocalHandler(BaseHTTPRequestHandler):
    """Answers GET alone; without a token, for this machine's users alone."""

    token: str = ""
    server_version, sys_version = "fedstale", ""
    timeout = 10  # a connection that sends nothing holds a thread no longer

    def do_GET(self) -> None:
        """Answer, unless the question comes by another site."""
        parts = urlsplit(self.path)
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if not self.token and not is_loopback(host):
            # Another site that makes its name point here would read what only users here may.
            self.send(403, b"this page is for users of this machine\n")
        else:
            self.answer(parts.path, parse_qs(parts.query))

    def answer(self, path: str, query: Mapping[str, Sequence[str]]) -> None:
        """Send the answer to a path; a subclass has some."""
        self.send(404, b"there is no such page\n")

    def send(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        """Send an answer of a content type."""
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request a second is no news."""


class _BoardHandler(LocalHandler):
    board: Board

    def answer(self, path: str, query: Mapping[str, Sequence[str]]) -> None:
        """Answer with a file or with the board."""
        token = query.get("token", [""])[0]
        if path == "/data.json":
            if not hmac.compare_digest(token.encode(), self.token.encode()) and self.token:
                self.send(403, b"a token is needed: open the address that was printed\n")
            else:
                body = json.dumps(self.board.snapshot(), allow_nan=False).encode()
                self.send(200, body, "application/json; charset=utf-8")
        elif path in _FILES:
            *_, kind = _FILES[path]
            self.send(200, _content(path), f"{kind}; charset=utf-8")
        else:
            super().answer(path, query)


@cache
def _content(path: str) -> bytes:
    package, name, _ = _FILES[path]
    return (resources.files(package) / name).read_bytes()


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
