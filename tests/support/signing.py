"""A root of trust as Sigstore's, for tests: an authority, two logs, and signers whom it vouches for."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

DER = serialization.Encoding.DER
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo
SCT = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
SHA256 = ec.ECDSA(hashes.SHA256())
NOW = datetime.now(timezone.utc).replace(microsecond=0)
CLAIMS = "1.3.6.1.4.1.57264.1"


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def der(tag: int, content: bytes) -> bytes:
    """A value in DER, of less than 64 KiB."""
    size = len(content)
    length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big")
    return bytes([tag]) + length + content


class Root:
    """The keys of an authority, of a log of certificates, and of a log of signatures."""

    def __init__(self) -> None:
        self.authority, self.ctlog, self.rekor = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(3)
        )
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        builder = self._builder(self.name, self.authority.public_key())
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        usage = self._usage(signs=False)
        builder = builder.add_extension(usage, critical=True).add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key()), critical=False
        )
        self.certificate = builder.sign(self.authority, hashes.SHA256())

    def write(self, path: Path) -> Path:
        """Write the file of a root of trust."""
        valid = {"start": (NOW - timedelta(days=2)).isoformat()}
        certificate = {"rawBytes": text(self.certificate.public_bytes(DER))}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            public = key.public_key().public_bytes(DER, SPKI)
            return {
                "baseUrl": "https://log.example.com",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": text(public),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": valid,
                },
                "logId": {"keyId": text(hashlib.sha256(public).digest())},
            }

        authority = {
            "subject": {"organization": "tests", "commonName": "tests"},
            "uri": "https://authority.example.com",
            "certChain": {"certificates": [certificate]},
            "validFor": valid,
        }
        content = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.rekor)],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self.ctlog)],
            "timestampAuthorities": [],
        }
        path.write_text(json.dumps(content))
        return path

    def attest(
        self,
        wheel: Path,
        repository: str,
        *,
        workflow: str = "release.yml@refs/tags/v1",
        person: str | None = None,
        digest: str | None = None,
    ) -> Path:
        """Write the provenance of a wheel as an index serves it, signed by a workflow or a person."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(key, repository, workflow, person)
        digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
        statement = json.dumps(
            {
                "_type": "https://in-toto.io/Statement/v1",
                "subject": [{"name": wheel.name, "digest": {"sha256": digest}}],
                "predicateType": "https://docs.pypi.org/attestations/publish/v1",
                "predicate": None,
            }
        ).encode()
        kind = b"application/vnd.in-toto+json"
        signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)
        signature = key.sign(signed, SHA256)
        attestation = {
            "version": 1,
            "verification_material": {
                "certificate": text(certificate.public_bytes(DER)),
                "transparency_entries": [self._entry(certificate, statement, signature)],
            },
            "envelope": {"statement": text(statement), "signature": text(signature)},
        }
        publisher = {"kind": "GitHub", "repository": repository, "workflow": "release.yml"}
        bundle = {"publisher": publisher, "attestations": [attestation]}
        path = wheel.with_name(f"{wheel.name}.provenance")
        path.write_text(json.dumps({"version": 1, "attestation_bundles": [bundle]}))
        return path

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self.name)
        builder = builder.public_key(key).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(NOW - timedelta(days=1))
        return builder.not_valid_after(NOW + timedelta(days=1))

    @staticmethod
    def _usage(*, signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(signs, False, False, False, False, not signs, not signs, False, False)

    def _certificate(
        self, key: ec.EllipticCurvePrivateKey, repository: str, workflow: str, person: str | None
    ) -> x509.Certificate:
        """The certificate of a signer, with the promise of the log of certificates."""
        builder = self._builder(x509.Name([]), key.public_key())
        build = f"https://github.com/{repository}/.github/workflows/{workflow}"
        named = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(build)])
        issuer = self.authority.public_key()
        claims = {
            "8": "https://token.actions.githubusercontent.com",
            "12": f"https://github.com/{repository}",
            "18": build,
        }
        if person is not None:
            named = x509.SubjectAlternativeName([x509.RFC822Name(person)])
            claims = {"8": "https://accounts.google.com"}
        builder = builder.add_extension(self._usage(signs=True), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
        )
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
        )
        builder = builder.add_extension(named, critical=True)
        for number, claim in claims.items():
            value = der(0x0C, claim.encode())
            extension = x509.UnrecognizedExtension(ObjectIdentifier(f"{CLAIMS}.{number}"), value)
            builder = builder.add_extension(extension, critical=False)
        # The log signs the certificate without its promise.
        tbs = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        above = hashlib.sha256(issuer.public_bytes(DER, SPKI)).digest()
        entry = above + len(tbs).to_bytes(3, "big") + tbs
        time = int(NOW.timestamp() * 1000)
        promised = struct.pack("!BBQH", 0, 0, time, 1) + entry + b"\0\0"
        signature = self.ctlog.sign(promised, SHA256)
        log = hashlib.sha256(self.ctlog.public_key().public_bytes(DER, SPKI)).digest()
        promise = b"\0" + log + struct.pack("!QH", time, 0) + b"\x04\x03"
        promise += struct.pack("!H", len(signature)) + signature
        listed = struct.pack("!HH", len(promise) + 2, len(promise)) + promise
        extension = x509.UnrecognizedExtension(SCT, der(0x04, listed))
        return builder.add_extension(extension, critical=False).sign(
            self.authority, hashes.SHA256()
        )

    def _entry(
        self, certificate: x509.Certificate, statement: bytes, signature: bytes
    ) -> dict[str, Any]:
        """The entry of a signature in a log of this entry alone."""
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        spec = {
            "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
            "payloadHash": {
                "algorithm": "sha256",
                "value": hashlib.sha256(statement).hexdigest(),
            },
            "signatures": [{"signature": text(signature), "verifier": text(pem)}],
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}).encode()
        log = hashlib.sha256(self.rekor.public_key().public_bytes(DER, SPKI)).digest()
        time = int(NOW.timestamp())
        promised = {
            "body": text(body),
            "integratedTime": time,
            "logID": log.hex(),
            "logIndex": 0,
        }
        promise = self.rekor.sign(json.dumps(promised, separators=(",", ":")).encode(), SHA256)
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log.example.com\n1\n{text(root)}\n"
        mark = text(log[:4] + self.rekor.sign(note.encode(), SHA256))
        return {
            "logIndex": "0",
            "logId": {"keyId": text(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": text(promise)},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": text(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.example.com {mark}\n"},
            },
            "canonicalizedBody": text(body),
        }
