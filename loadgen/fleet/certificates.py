"""Makes the TLS material of one NATS server: its own authority, and a certificate signed by it."""

import datetime as dt
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825  # 825 days are the most that some clients accept
RENEW_DAYS = 90  # a certificate with less left is made anew


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes


def new_authority() -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Slackline's authority")])
    certificate = (
        _builder(name, key.public_key(), AUTHORITY_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate, key)


def new_server(authority: Pair, hosts: Sequence[str]) -> Pair:
    """A certificate for a server that is reached under these names and addresses."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signer = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats-server")]),
            key.public_key(),
            SERVER_DAYS,
        )
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate, key)


def is_current(certificate: bytes, hosts: Iterable[str]) -> bool:
    """Tells whether the certificate names all these hosts and is valid for RENEW_DAYS more."""
    read = x509.load_pem_x509_certificate(certificate)
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(_names(hosts)) <= set(names) and days_left(certificate) >= RENEW_DAYS


def hosts_of(certificate: bytes) -> list[str]:
    """The names and addresses of a server's certificate."""
    read = x509.load_pem_x509_certificate(certificate)
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def days_left(certificate: bytes) -> int:
    read = x509.load_pem_x509_certificate(certificate)
    return (read.not_valid_after_utc - dt.datetime.now(dt.UTC)).days


def _names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    return [_name(host) for host in hosts]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    name: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # for clocks that differ
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
