"""Mutual TLS between instances and routers: loads certificates and keys from PEM files, and explains failed connections."""

import ssl
from pathlib import Path

from pdserve.config import ControlConfig
from pdserve.errors import SetupError

UNTRUSTED = "its certificate is not signed by a CA in --control-cafile"
NAME_MISMATCH = "its certificate is not valid for this address"
NO_TLS = "it does not speak TLS, which --control-certfile requires"
CLOSED_EARLY = (
    "it closed the connection: it may be no --control-port, require a --control-certfile of a CA that it trusts, or run"
    " another version"
)
NAME_MISMATCH_CODES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def check_key_pair(prefix: str, certfile: str, keyfile: str) -> None:
    """Check that a certificate and its private key can be loaded together.

    Args:
        prefix: prefix of their flags, such as `--ssl`.

    Raises:
        SetupError: a file cannot be read, or the two do not belong together.
    """
    for end, path in (("certfile", certfile), ("keyfile", keyfile)):
        _check_readable(f"{prefix}-{end}", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SetupError(f"{prefix}-certfile {certfile} with {prefix}-keyfile {keyfile}: {_describe(error)}") from error


def server_context(config: ControlConfig) -> ssl.SSLContext | None:
    """Return the TLS context of a router's control port, which requires a client certificate; None for plain TCP.

    Raises:
        SetupError: one of the three flags or files is missing, or the files do not belong together.
    """
    return _context(config, ssl.PROTOCOL_TLS_SERVER)


def client_context(config: ControlConfig) -> ssl.SSLContext | None:
    """Return the TLS context with which an instance dials routers; otherwise like `server_context`."""
    return _context(config, ssl.PROTOCOL_TLS_CLIENT)


def describe_failure(error: Exception | None, was_established: bool) -> str:
    """Explain to users why a router did not accept an instance.

    Args:
        error: the exception that ended the attempt, if any.
        was_established: the TCP or TLS connection had been established before.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return NAME_MISMATCH if error.verify_code in NAME_MISMATCH_CODES else UNTRUSTED
    if was_established and not isinstance(error, TimeoutError):
        return CLOSED_EARLY
    cut_off = isinstance(error, ConnectionResetError | ConnectionAbortedError | ssl.SSLError)
    return NO_TLS if cut_off else "not reachable"


def _context(config: ControlConfig, protocol: int) -> ssl.SSLContext | None:
    certfile, keyfile, cafile = config.control_certfile, config.control_keyfile, config.control_cafile
    if not (certfile or keyfile or cafile):
        return None
    if not (certfile and keyfile and cafile):
        raise SetupError("--control-certfile, --control-keyfile and --control-cafile belong together: give all or none")
    check_key_pair("--control", certfile, keyfile)
    _check_readable("--control-cafile", cafile)
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certfile, keyfile)
    try:
        context.load_verify_locations(cafile)
    except OSError as error:
        raise SetupError(f"--control-cafile {cafile} holds no certificate in PEM: {_describe(error)}") from error
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise SetupError(f"{flag} {path}: {error.strerror}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
