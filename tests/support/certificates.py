"""Self-signed certificates for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def write_certificate(folder: Path) -> Path:
    """Write a certificate for 127.0.0.1; returns its file NAME, next to which is NAME.key."""
    chain, key = folder / "server.pem", folder / "server.pem.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return chain
