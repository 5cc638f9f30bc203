"""Certificates and keys in PEM files, and what they are for: TLS between instances and routers in which both show one."""

import ssl
from pathlib import Path

import grpc

from pdserve.config import ControlConfig
from pdserve.errors import SetupError

HANGS_UP = "it hangs up: it may ask for a --control-certfile of an authority that it trusts"
REFUSALS = {  # what gRPC says of a connection that came to nothing → what an instance says of the router
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of an authority in --control-cafile",
    "Hostname Verification": "its certificate does not name that address",
    "WRONG_VERSION_NUMBER": "it speaks no TLS, as --control-certfile here asks for",
    "Socket closed": HANGS_UP,
    "Connection reset": HANGS_UP,
    "Broken pipe": HANGS_UP,
}


def check_pair(prefix: str, certfile: str, keyfile: str) -> None:
    """Raises SetupError if they cannot be read, or are no pair. `prefix` is that of their flags, such as `--ssl`."""
    for end, path in (("certfile", certfile), ("keyfile", keyfile)):
        _read(f"{prefix}-{end}", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SetupError(f"{prefix}-certfile {certfile} with {prefix}-keyfile {keyfile}: {_said(error)}") from error


def server_credentials(config: ControlConfig) -> grpc.ServerCredentials | None:
    """Of a router's control port, which lets nobody in without a certificate. None: it speaks no TLS.

    Raises:
        SetupError: one of the three flags is missing, or a file is, or they do not fit together.
    """
    files = _files(config)
    if files is None:
        return None
    key, chain, authorities = files
    return grpc.ssl_server_credentials([(key, chain)], authorities, require_client_auth=True)


def channel_credentials(config: ControlConfig) -> grpc.ChannelCredentials | None:
    """Of an instance, for the routers that it dials; otherwise like `server_credentials`."""
    files = _files(config)
    if files is None:
        return None
    key, chain, authorities = files
    return grpc.ssl_channel_credentials(authorities, key, chain)


def unreachable(details: str) -> str:
    """Why a router could not be reached, from what gRPC says."""
    said = details if details.startswith("failed to connect") else ""
    return next((meaning for sign, meaning in REFUSALS.items() if sign in said), "not reachable")


def _files(config: ControlConfig) -> tuple[bytes, bytes, bytes] | None:
    """Key, chain and authorities; nothing where there are none."""
    certfile, keyfile, cafile = config.control_certfile, config.control_keyfile, config.control_cafile
    if not (certfile or keyfile or cafile):
        return None
    if not (certfile and keyfile and cafile):
        raise SetupError("--control-certfile, --control-keyfile and --control-cafile belong together: give all or none")
    check_pair("--control", certfile, keyfile)
    authorities = _read("--control-cafile", cafile)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile)
    except OSError as error:
        raise SetupError(f"--control-cafile {cafile} holds no certificate in PEM: {_said(error)}") from error
    return Path(keyfile).read_bytes(), Path(certfile).read_bytes(), authorities


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SetupError(f"{flag} {path}: {error.strerror}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
