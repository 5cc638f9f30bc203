"""Certificates and keys in PEM files, and what they are for: TLS between instances and routers in which both show one."""

import ssl
from pathlib import Path

from pdserve.config import ControlConfig
from pdserve.errors import SetupError

DISTRUSTED = "its certificate is not of an authority in --control-cafile"
MISNAMED = "its certificate does not name that address"
NO_TLS = "it speaks no TLS, as --control-certfile here asks for"
HANGS_UP = "it hangs up: it may ask for a --control-certfile of an authority that it trusts, or be of another version"
MISNAMES = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def check_pair(prefix: str, certfile: str, keyfile: str) -> None:
    """Raises SetupError if they cannot be read, or are no pair. `prefix` is that of their flags, such as `--ssl`."""
    for end, path in (("certfile", certfile), ("keyfile", keyfile)):
        _check_readable(f"{prefix}-{end}", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SetupError(f"{prefix}-certfile {certfile} with {prefix}-keyfile {keyfile}: {_said(error)}") from error


def server_context(config: ControlConfig) -> ssl.SSLContext | None:
    """Of a router's control port, which lets nobody in without a certificate. None: it speaks no TLS.

    Raises:
        SetupError: one of the three flags is missing, or a file is, or they do not fit together.
    """
    return _context(config, ssl.PROTOCOL_TLS_SERVER)


def client_context(config: ControlConfig) -> ssl.SSLContext | None:
    """Of an instance, for the routers that it dials; otherwise like `server_context`."""
    return _context(config, ssl.PROTOCOL_TLS_CLIENT)


def unreachable(error: Exception | None, opened: bool) -> str:
    """Why a router has not let an instance in. `opened`: after the two had a connection, or while it was dialled."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return MISNAMED if error.verify_code in MISNAMES else DISTRUSTED
    if opened and not isinstance(error, TimeoutError):
        return HANGS_UP
    cut_off = isinstance(error, ConnectionResetError | ConnectionAbortedError | ssl.SSLError)
    return NO_TLS if cut_off else "not reachable"


def _context(config: ControlConfig, protocol: int) -> ssl.SSLContext | None:
    certfile, keyfile, cafile = config.control_certfile, config.control_keyfile, config.control_cafile
    if not (certfile or keyfile or cafile):
        return None
    if not (certfile and keyfile and cafile):
        raise SetupError("--control-certfile, --control-keyfile and --control-cafile belong together: give all or none")
    check_pair("--control", certfile, keyfile)
    _check_readable("--control-cafile", cafile)
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certfile, keyfile)
    try:
        context.load_verify_locations(cafile)
    except OSError as error:
        raise SetupError(f"--control-cafile {cafile} holds no certificate in PEM: {_said(error)}") from error
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise SetupError(f"{flag} {path}: {error.strerror}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
