"""Certificates and key files for tests, made on the spot: no key lies in the repository, and none expires in it."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Issued:
    """Files of one certificate; `ca` is the authority's own."""

    key: Path
    cert: Path
    ca: Path

    def flags(self) -> list[str]:
        return [f"--ssl-keyfile={self.key}", f"--ssl-certfile={self.cert}"]


class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.ca = folder / f"{name}.pem"
        extension = x509.BasicConstraints(ca=True, path_length=0)
        built = _builder(self._name, self._name, self._key).add_extension(extension, critical=True)
        self.ca.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Issued:
        """A fresh key and its certificate in NAME.key and NAME.crt, which are replaced where they exist."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        built = _builder(_name(name), self._name, key)
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issued = Issued(self._folder / f"{name}.key", self._folder / f"{name}.crt", self.ca)
        replace(issued.key, _private(key))
        certificate = built.sign(self._key, hashes.SHA256())
        replace(issued.cert, certificate.public_bytes(serialization.Encoding.PEM))
        return issued


def key_file(folder: Path, *keys: str) -> Path:
    """A file of bearer tokens; replaced at once where it exists."""
    path = folder / "keys.txt"
    replace(path, "".join(f"{key}\n" for key in keys).encode())
    return path


def replace(path: Path, content: bytes) -> None:
    """As whoever rotates a secret does: a whole new file takes the name."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
