"""What is said of a SuperLink that cannot be reached, and of the log of a Flower process."""

import http.server
import socket
import ssl

import pytest
from loopback import Loopback

from fedstale.deployment import diagnosis
from fedstale.deployment.commands import Address, write_certificates
from fedstale.deployment.diagnosis import check_health, explain, is_healthy
from fedstale.errors import ConfigError, FedstaleError


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return write_certificates(tmp_path_factory.mktemp("tls"), ["localhost", "127.0.0.1"])


@pytest.fixture(autouse=True)
def here():
    """Connect within this process, where nothing else answers."""
    with Loopback().installed() as here:
        yield here


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


def serving(here, tls=None):
    """Serve with a certificate, or without TLS; gives the port."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
    return here.http(Healthy, tls=context)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_server_with_the_certificate_is_trusted_by_whoever_has_the_authority(here, tls, host):
    with serving(here, tls) as port:
        check_health(Address(host, port), tls.ca)
        assert is_healthy(Address(host, port), tls.ca)


def test_wrong_certificate(here, tls, tmp_path):
    other = write_certificates(tmp_path, ["localhost"])
    with serving(here, tls) as port, pytest.raises(FedstaleError, match="not signed by the given"):
        check_health(Address("localhost", port), other.ca)


def test_wrong_name(here, tmp_path):
    elsewhere = write_certificates(tmp_path, ["example.org"])
    with serving(here, elsewhere) as port, pytest.raises(FedstaleError, match="not for the name"):
        check_health(Address("localhost", port), elsewhere.ca)


def test_wrong_port(tls):
    with pytest.raises(FedstaleError, match="nothing listens at"):
        check_health(Address("127.0.0.1", 7), tls.ca)


def test_unknown_name(tls, monkeypatch):
    def resolve(*address, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", resolve)
    with pytest.raises(FedstaleError, match=r"the name 'no-such\.invalid' of the SuperLink"):
        check_health(Address("no-such.invalid", 8000), tls.ca)


def test_no_tls_where_tls_is_expected_and_the_other_way_round(here, tls):
    with serving(here) as port:
        check_health(Address("127.0.0.1", port), None, insecure=True)
        with pytest.raises(FedstaleError, match="does not speak TLS"):
            check_health(Address("127.0.0.1", port), tls.ca)
    with serving(here, tls) as port, pytest.raises(FedstaleError, match="plain HTTP"):
        check_health(Address("127.0.0.1", port), None, insecure=True)


def test_something_that_never_answers(here, tls, monkeypatch):
    monkeypatch.setattr(diagnosis, "_LIMIT_S", 0.2)
    with here.http(None) as port, pytest.raises(FedstaleError, match="does not answer within"):
        check_health(Address("127.0.0.1", port), tls.ca)


def test_a_certificate_file_that_is_missing_or_none(tls, tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        check_health(Address("127.0.0.1", 1), tmp_path / "nowhere.crt")
    (tmp_path / "text.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="no PEM certificate"):
        check_health(Address("127.0.0.1", 1), tmp_path / "text.crt")


@pytest.mark.parametrize("text", ["localhost", "localhost:0", "a:b", ":1", "http://x:1", "x:70000"])
def test_an_address_that_is_none(text):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Address.parse(text)


# Lines that Flower 1.41 really writes.
LOGS = {
    "Exit Code: 305\n[code: 2004] Failed to activate SuperNode.": "register its public key",
    "[code: 2001] SuperNode authentication is enabled. All": "accepts registered nodes only",
    '127.0.0.1:45972 - "POST /v1/fleet/activate-node HTTP/1.1" 401': "set the node's clock",
    "INFO :      SuperNode terminated gracefully.": "set this machine's clock",
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to": "not signed by the",
    "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)": "does not speak TLS",
    "[Errno 111] Connection refused": "nothing listens",
    "[Errno -2] Name or service not known": "name is unknown",
    "Path argument `--ssl-ca-certfile` does not point to a file.": "--ssl-ca-certfile names a file",
    "('127.0.0.1', 48655): address already in use": "port is taken",
    "Option `--insecure` was set. Starting\nx\nConnection attempt failed, retrying": "plain HTTP",
    "ModuleNotFoundError: No module named 'torch'": "needs the package torch",
}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_becomes_one_sentence(log):
    sentence = explain(log)
    assert LOGS[log] in sentence
    assert "\n" not in sentence


def test_a_log_without_a_known_failure_is_not_explained():
    assert explain("INFO : Starting Flower SuperNode") is None


def test_a_log_is_not_explained_before_its_reason_is_written():
    written = "ERROR : SSL/TLS handshake error detected.\n"
    assert explain(written) is None
    written += "ERROR : Exit Code: 305\n[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
    assert "not signed by the authority" in explain(written)
