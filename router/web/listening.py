"""The socket that clients reach."""

import socket

from pdserve.config import RouterConfig
from pdserve.errors import SetupError


def listen(config: RouterConfig) -> socket.socket:
    """The socket for clients, bound before anything slow is loaded, so that a taken port is known at once.

    Event loops set TCP_NODELAY on connections whose socket says TCP, and this one's do only if it says so itself. The kernel
    cuts off clients that take nothing of what is sent to them; the time-out is passed on to connections.

    Raises:
        SetupError: the port is taken.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.reuse_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_timeout_seconds * 1000))
    try:
        listening.bind((host, port))
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return listening
