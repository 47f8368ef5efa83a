"""Makes a self-signed TLS certificate for tests, by OpenSSL."""

import subprocess
from pathlib import Path


def certificate_in(folder: Path, name: str) -> tuple[Path, Path]:
    """The certificate for a name (`IP:127.0.0.1`, `DNS:gateway.example`), and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={name}",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
