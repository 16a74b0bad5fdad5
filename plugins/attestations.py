"""Attestations of publishers (PEP 740): the signer of a wheel, checked without a network."""

from __future__ import annotations

import csv
import hashlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

from opgraft.base.files import read_regular
from opgraft.base.text import described
from opgraft.errors import InputError, PluginError
from opgraft.plugins.discovery import normalized
from opgraft.plugins.locking import SIGNER
from opgraft.plugins.records import as_if_installed, digest_of_wheel, rows_of

_LARGEST = 1 << 22  # bytes of a provenance
_LARGEST_RECORD = 1 << 26
_STATEMENT = "application/vnd.in-toto+json"
_OF_ARCHIVES = (
    OSError,
    ValueError,
    StopIteration,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    csv.Error,
)
"""Errors of reading a wheel, which may be damaged, encrypted or compressed in an unknown way."""

_CLAIMS = ("1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.12", "1.3.6.1.4.1.57264.1.18")
"""Claims in a certificate of Sigstore: issuer, source and build of ``SIGNER``."""


class Attestations:
    """The attestations in a folder: each wheel ``NAME.whl`` beside ``NAME.whl.provenance``."""

    def __init__(self, folder: Path, trust_root: Path | None) -> None:
        """Read the root of trust.

        Args:
            folder: with wheels, and with what a package index says of their provenance.
            trust_root: the file of a root of trust, ``None`` for that of Sigstore itself.

        Raises:
            InputError: the root of trust cannot be read, or a library is missing.
        """
        self.folder = folder
        try:
            # Few lock with attestations, and the imports take a second.
            from sigstore.models import ClientTrustConfig, TrustedRoot
            from sigstore.verify import Verifier
        except ImportError as error:
            raise InputError(
                f"attestations cannot be checked ({error}): pip install 'opgraft[attestations]'"
            ) from error
        try:
            if trust_root is None:
                root = ClientTrustConfig.production(offline=True).trusted_root
            else:
                root = TrustedRoot.from_file(str(trust_root))
            self._verifier = Verifier(trusted_root=root)
        except Exception as error:  # of a library that reads somebody's file
            where = trust_root or "of Sigstore"
            raise InputError(
                f"the root of trust {where} cannot be used: {described(error)}"
            ) from error

    def identity_of(self, name: str, version: str, files: str) -> dict[str, str] | None:
        """Return the signer of the installed wheel, with the attestation; ``None`` without a wheel.

        Args:
            name, version: of the installed distribution.
            files: the digest of its files, as in a lockfile.

        Raises:
            PluginError: no wheel has these files, or the wheel has no valid attestation.
        """
        wheels = [path for path in sorted(self.folder.glob("*.whl")) if _is_of(path, name, version)]
        for wheel in wheels:
            if _digest_of_files(wheel) == files:
                return self._checked(wheel)
        if wheels:
            raise PluginError(f"its files are not those of {wheels[0]}")
        return None

    def _checked(self, wheel: Path) -> dict[str, str]:
        from pypi_attestations import Provenance

        path = wheel.with_name(f"{wheel.name}.provenance")
        try:
            text = read_regular(path, _LARGEST).decode()
            provenance = Provenance.model_validate_json(text)
            given = [each for one in provenance.attestation_bundles for each in one.attestations]
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            identities = [self._verified(each, wheel.name, digest) for each in given]
        except Exception as error:  # of a library that reads somebody's file
            raise PluginError(
                f"its attestation {path} does not hold: {described(error)}"
            ) from error
        if not identities or identities.count(identities[0]) != len(identities):
            raise PluginError(f"its attestations {path} are not of one signer")
        kept = json.dumps(json.loads(text), separators=(",", ":"))
        return {**identities[0], "wheel": wheel.name, "sha256": digest, "attestation": kept}

    def _verified(self, attestation: Any, wheel: str, digest: str) -> dict[str, str]:
        """Return the signer of an attestation.

        Raises:
            ValueError, sigstore.errors.Error: the attestation is invalid, or of another wheel.
        """
        kind, payload = self._verifier.verify_dsse(attestation.to_bundle(), _AnySigner())
        statement = json.loads(payload)
        subjects = [(each["name"], each["digest"].get("sha256")) for each in statement["subject"]]
        if kind != _STATEMENT or subjects != [(wheel, digest)]:
            raise ValueError(f"it is about {subjects}, not {wheel} with the SHA-256 {digest}")
        claims = attestation.certificate_claims
        if _CLAIMS[0] not in claims:
            raise ValueError("its certificate does not say who vouches for the signer")
        # A person has neither repository nor workflow.
        subject = _subject(attestation.verification_material.certificate)
        found = [claims.get(number) or subject for number in _CLAIMS]
        return dict(zip(SIGNER, found, strict=True))


def _subject(certificate: bytes) -> str:
    """Return the subject of a certificate of Sigstore: the address of a person or a workflow.

    Raises:
        ValueError: the certificate has another number of subjects, or one that is no text.
        x509.ExtensionNotFound: the certificate has none.
    """
    from cryptography import x509

    extensions = x509.load_der_x509_certificate(certificate).extensions
    (name,) = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if not isinstance(name.value, str):
        raise ValueError(f"the subject of its certificate is no text: {name.value!r:.100}")
    return name.value


class _AnySigner:
    """The policy for certificates. The lockfile names the signer, and a person decides."""

    def verify(self, cert: Any) -> None:
        """Accept a certificate of the root of trust."""


def _is_of(wheel: Path, name: str, version: str) -> bool:
    """Return True if a wheel is one of a version, however that is spelled."""
    from packaging.utils import InvalidWheelFilename, canonicalize_version, parse_wheel_filename

    try:
        named, of_wheel, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        return False
    is_same = canonicalize_version(of_wheel) == canonicalize_version(version)
    return is_same and named == normalized(name)


def _digest_of_files(wheel: Path) -> str | None:
    """Return the digest of the files of a wheel as if it was installed, ``None`` if unreadable."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(each for each in archive.infolist() if _is_record(each.filename))
            if record.file_size > _LARGEST_RECORD:
                return None
            rows = rows_of(archive.read(record).decode())
            return digest_of_wheel(as_if_installed(rows))
    except _OF_ARCHIVES:
        return None


def _is_record(name: str) -> bool:
    return name.count("/") == 1 and name.endswith(".dist-info/RECORD")
