"""Tests of NATS keys: they are as in the example of NATS' documentation, and damage is seen."""

import base64
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared.bus.nkey import login_of, new_seed, read_login
from shared.errors import ConfigError

# docs.nats.io, "NKeys": nk -gen user -pubout
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
CREDS = f"""-----BEGIN NATS USER JWT-----
eyJ0eXAi.eyJqdGki.c2ln
------END NATS USER JWT------

************************* IMPORTANT *************************
-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------
"""


def test_the_public_key_of_the_documented_seed_is_the_documented_one() -> None:
    login = login_of(SEED.encode())
    assert (login.public, login.jwt) == (PUBLIC, "")


def test_a_signature_is_valid_for_its_nonce_alone() -> None:
    login = login_of(SEED.encode())
    public = Ed25519PublicKey.from_public_bytes(base64.b32decode(PUBLIC)[1:-2])
    signature = base64.b64decode(login.sign("nonce"))
    public.verify(signature, b"nonce")
    with pytest.raises(InvalidSignature):
        public.verify(signature, b"other")


def test_new_seeds_differ_and_are_read_again() -> None:
    seeds = [new_seed() for _ in range(20)]
    assert len({login_of(f"{seed}\n".encode()).public for seed in seeds}) == 20


def test_a_file_of_credentials_gives_its_jwt_and_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_text(CREDS)
    login = read_login(file)
    assert (login.public, login.jwt) == (PUBLIC, "eyJ0eXAi.eyJqdGki.c2ln")


@pytest.mark.parametrize("text", ["", PUBLIC, SEED[:-1], SEED.replace("C", "D", 1), SEED.lower()])
def test_what_is_no_seed_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "user.nk"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"user\.nk") as caught:
        read_login(file)
    assert not text or text not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*absent"):
        read_login(tmp_path / "absent")
