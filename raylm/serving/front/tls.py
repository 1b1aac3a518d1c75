"""Certificates: whether clients could use one, asked before HAProxy gets it. Standard library alone."""

from __future__ import annotations

import os
import ssl
from typing import NoReturn

from raylm.serving.front.settings import BadCertificate, Tls

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_MAX_ROUNDS = 10


def check(tls: Tls) -> None:
    """Shake hands with itself. Raises BadCertificate where a file cannot be read, the key is another one's or has a
    password, or the certificate is not valid now, or is none of a server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = _VERSIONS[tls.min_version]

    def refuse_password() -> NoReturn:
        raise BadCertificate(f"the key {tls.key!r} has a password; give one without")

    for path in (tls.certificate, tls.key):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise BadCertificate(f"{path!r} cannot be read: {error.strerror}") from None
    try:
        server.load_cert_chain(tls.certificate, tls.key, password=refuse_password)
    except ssl.SSLError as error:
        raise BadCertificate(_why(tls, error)) from None
    try:
        _shake_hands(server, trusting(tls.certificate))
    except ssl.SSLCertVerificationError as error:
        raise BadCertificate(f"the certificate {tls.certificate!r} is refused: {error.verify_message}") from None
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"the certificate {tls.certificate!r} cannot be used: {error}") from None


def pem_of(tls: Tls) -> str:
    """Both files in one, as HAProxy takes it, without the lines that are none of PEM. Raises OSError."""
    lines = [line for path in dict.fromkeys((tls.certificate, tls.key)) for line in _lines_of(path)]
    return "".join(f"{line}\n" for line in lines)


def version_of(tls: Tls) -> tuple[tuple[int, ...], ...]:
    """What changes with the files. Raises OSError."""
    found = [os.stat(path) for path in (tls.certificate, tls.key)]
    return tuple((each.st_dev, each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _why(tls: Tls, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {tls.key!r} does not fit the certificate {tls.certificate!r}"
    return (
        f"the certificate {tls.certificate!r} and the key {tls.key!r} cannot be used: both must be PEM "
        f"({error.reason or error})"
    )


def trusting(certificate: str) -> ssl.SSLContext:
    """For a client that trusts this one server, whatever name it asks for. Raises SSLError, OSError."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    return client


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """In memory. Raises what a client would see."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    waiting = sides
    for _ in range(_MAX_ROUNDS):
        waiting = [side for side in waiting if not _has_done(side)]
        if not waiting:
            return
    raise ValueError("the handshake does not end")


def _has_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _lines_of(path: str) -> list[str]:
    """The blocks of a file of PEM; what stands between them explains them to people."""
    found, is_inside = [], False
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file.read().splitlines():
            is_inside = is_inside or line.startswith("-----BEGIN ")
            if is_inside:
                found.append(line.strip())
            is_inside = is_inside and not line.startswith("-----END ")
    return [line for line in found if line]
