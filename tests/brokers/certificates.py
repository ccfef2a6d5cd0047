"""Certificates for tests of TLS: a CA, a server and a client by it, and another CA that nobody trusts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def openssl(folder: Path, *arguments: str) -> None:
    """Run it in a folder; where it is not installed, the test is skipped."""
    found = shutil.which("openssl")
    if found is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    subprocess.run([found, *arguments], cwd=folder, check=True, capture_output=True)


def make(folder: Path, names: str) -> Path:
    """Into a folder: `ca`, `server`, `client` and `other`, each as .pem and .key. `names` are those of the server."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")
    for name in ("ca", "other"):
        openssl(
            folder, "req", "-x509", *key, f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "2"
        )
    (folder / "names").write_text(f"subjectAltName={names}\n")
    for name in ("server", "client"):
        openssl(folder, "req", *key, f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder
