"""NATS keys: a user's Ed25519 key as text, and the proof that a client has it. A seed (SU...) is
secret; its public key begins with U. Both are base32 of a prefix, 32 bytes and a checksum. Source:
github.com/nats-io/nkeys, README and strkey.go.
"""

import base64
import binascii
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shared.errors import ConfigError

SEED_PREFIX, USER_PREFIX = 18 << 3, 20 << 3
KEY_BYTES = 32
_SEED = re.compile(rb"(?m)^SU[A-Z2-7]{56}\s*$")
# as `nsc` writes it: a JWT, and the seed that signs for it
_JWT = re.compile(rb"BEGIN NATS USER JWT-+\s+([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Login:
    """A client's proof of who it is: its public key or its JWT, and signatures."""

    key: Ed25519PrivateKey
    public: str
    jwt: str

    def sign(self, nonce: str) -> bytes:
        """The signature of a server's nonce, in base64."""
        return base64.b64encode(self.key.sign(nonce.encode()))


def new_seed() -> str:
    return _text(
        bytes([SEED_PREFIX | USER_PREFIX >> 5, (USER_PREFIX & 31) << 3])
        + secrets.token_bytes(KEY_BYTES)
    )


def login_of(text: bytes) -> Login:
    """The login of a seed, or of a file of credentials as `nsc` writes it. Raises ConfigError."""
    found, jwt = _SEED.search(text), _JWT.search(text)
    if found is None:
        raise ConfigError("there is no seed of a NATS user in it")
    raw = base64.b32decode(found[0].strip() + b"=" * 6)
    if raw[-2:] != _checksum(raw[:-2]):
        raise ConfigError("its seed is damaged: the checksum does not fit")
    key = Ed25519PrivateKey.from_private_bytes(raw[2:-2])
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return Login(key, _text(bytes([USER_PREFIX]) + public), "" if jwt is None else jwt[1].decode())


def read_login(file: str | os.PathLike[str]) -> Login:
    """The login in a file. Raises a ConfigError that does not show the content."""
    try:
        return login_of(Path(file).read_bytes())
    except OSError as error:
        raise ConfigError(f"the credentials cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _text(raw: bytes) -> str:
    return base64.b32encode(raw + _checksum(raw)).decode().rstrip("=")


def _checksum(raw: bytes) -> bytes:
    """CRC-16/XMODEM, low byte first."""
    return binascii.crc_hqx(raw, 0).to_bytes(2, "little")
