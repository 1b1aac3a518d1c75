"""The certificate that HAProxy shows, exchanged while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable

from raylm.serving.front.admin import ask
from raylm.serving.front.settings import BadCertificate, Tls
from raylm.serving.front.tls import check, pem_of, version_of

LOOK_EVERY_S = 1.0


class Certificate:
    """Certificate and key in one file of HAProxy's. When the operator's files change it gets the new ones, if clients
    can use them; else it keeps those that it has."""

    def __init__(self, tls: Tls, path: str, complain: Callable[[str], object]) -> None:
        self.path = path
        self._tls = tls
        self._complain = complain
        self._look_at = 0.0
        self._seen: tuple[tuple[int, ...], ...] = ()
        self._problem = ""

    def write(self) -> None:
        """Write HAProxy's file. Raises BadCertificate, OSError."""
        self._seen = version_of(self._tls)
        check(self._tls)
        self._save(pem_of(self._tls))

    def look(self, now: float, admin_socket: str) -> None:
        """Give a HAProxy the files where they have changed."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            version = version_of(self._tls)
            if version == self._seen:
                return
            check(self._tls)
            pem = pem_of(self._tls)
            self._hand_over(pem, admin_socket)
            self._save(pem)
        except (BadCertificate, OSError) as error:
            if str(error) != self._problem:
                self._complain(f"the certificate is still that of before: {error}")
            self._problem = str(error)
            return
        self._seen, self._problem = version, ""
        self._complain(f"the certificate has changed: {self._tls.certificate}")

    def _hand_over(self, pem: str, admin_socket: str) -> None:
        for command in (f"set ssl cert {self.path} <<\n{pem}\n", f"commit ssl cert {self.path}\n"):
            answer = ask(admin_socket, command.encode()).decode(errors="replace").strip()
            if "created" not in answer and "Success" not in answer:
                raise BadCertificate(f"HAProxy does not take it: {' '.join(answer.split())}")

    def _save(self, pem: str) -> None:
        # What HAProxy reads when it is started again is whole, whenever that is.
        unnamed = f"{self.path}.new"
        with open(os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(pem)
        os.rename(unnamed, self.path)
