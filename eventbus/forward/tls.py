"""What TLS needs beyond the system's CAs: a private CA, a client certificate (mTLS). Kept out of every repr."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from eventbus.errors import ConfigError


class Tls:
    """`Tls(ca="ca.pem", cert="client.pem", key="client.key")`; each is a file, or the PEM text itself.

    With `ca` only certificates of that authority are trusted. `key` may stand in the file of `cert`.
    """

    __slots__ = ("_ca", "_cert", "_key", "_password")

    def __init__(
        self, *, ca: str | None = None, cert: str | None = None, key: str | None = None, password: str | None = None
    ) -> None:
        if key is not None and cert is None:
            raise ConfigError("tls.key: needs cert beside it")
        if ca is None and cert is None:
            raise ConfigError("tls: give ca, or cert and key, or all of them")
        self._ca, self._cert, self._key, self._password = ca, cert, key, password

    def context(self) -> ssl.SSLContext:
        """The context for connections; reads the files. Raises ConfigError that names the one that is wrong."""
        context = ssl.create_default_context() if self._ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self._ca is not None:
            try:
                with _as_file(self._ca) as file:
                    context.load_verify_locations(file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"tls.ca: {_shown(self._ca)} cannot be used: {_why(error)}") from None
        if self._cert is not None:
            try:
                with _as_file(self._cert) as cert, _as_file(self._key) as key:
                    # Never ask on a terminal: without a password an encrypted key is an error.
                    context.load_cert_chain(str(cert), key, self._password or "")
            except (OSError, ValueError) as error:
                raise ConfigError(f"tls.cert: {_shown(self._cert)} cannot be used: {_why(error)}") from None
        return context

    def __repr__(self) -> str:
        return f"Tls(ca={self._ca and _shown(self._ca)}, cert={self._cert and _shown(self._cert)})"


def is_pem(text: str) -> bool:
    """Whether this is the thing itself and not the name of a file."""
    return text.lstrip().startswith("-----BEGIN")


@contextmanager
def _as_file(source: str | None) -> Iterator[str | None]:
    """OpenSSL reads certificates and keys from files only; what came by the environment lives in one for a moment."""
    if source is None or not is_pem(source):
        yield source
        return
    handle, name = tempfile.mkstemp(prefix="eventbus-", suffix=".pem")  # readable by nobody else
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        yield name
    finally:
        os.unlink(name)


def _shown(source: str) -> str:
    return "the PEM text" if is_pem(source) else source


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is no PEM of a certificate and its key"
    return str(getattr(error, "strerror", None) or error)
