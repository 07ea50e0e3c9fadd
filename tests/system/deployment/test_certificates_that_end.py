"""Certificates that end soon, or have ended, are named by the checks."""

import pytest
from typer.testing import CliRunner

from fedstale.cli.main import app
from fedstale.deployment.check import expiries
from fedstale.deployment.commands import write_certificates
from fedstale.errors import ConfigError


def test_certificates_that_end_are_told_before(tmp_path):
    for days in (1, 13, 40):
        folder = tmp_path / str(days)
        folder.mkdir()
        write_certificates(folder, ["localhost"], operators={"me": []}, days=days)
    assert expiries(tmp_path / "40" / "ca.crt", None) == []
    (soon,) = expiries(tmp_path / "13" / "me.pem")
    assert (soon.is_fault, "ends in 12 days" in soon.text) == (False, True)
    gone = tmp_path / "gone"
    gone.mkdir()
    write_certificates(gone, ["localhost"], days=-1)
    (ended,) = expiries(gone / "ca.crt")
    assert (ended.is_fault, "has ended" in ended.text) == (True, True)
    # Both authorities are in the file while one follows the other.
    both = tmp_path / "both.crt"
    both.write_bytes((gone / "ca.crt").read_bytes() + (tmp_path / "40" / "ca.crt").read_bytes())
    assert expiries(both) == []
    with pytest.raises(ConfigError, match="is no certificate"):
        expiries(tmp_path / "40" / "server.key")


@pytest.mark.deployment
def test_check_says_that_a_certificate_ends_soon(deployment, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstale.deployment.check.SOON_DAYS", 60)
    monkeypatch.setattr("fedstale.deployment.doors.SOON_DAYS", 60)
    at, ca = str(deployment.at), str(deployment.tls.ca)
    result = CliRunner().invoke(app, ["check", "--server", at, "--ca", ca])
    assert f"note: the certificate in {ca} ends in 29 days: renew it" in result.stdout
    monkeypatch.setenv("FLWR_HOME", deployment.operator_environment()["FLWR_HOME"])
    result = CliRunner().invoke(app, ["check", "digits", "up"])
    assert result.exit_code == 0, result.stdout
    for name in ("ca.crt", "operator.pem") if deployment.doors else ("ca.crt",):
        assert f"{deployment.folder / name} ends in 29 days" in result.stdout
