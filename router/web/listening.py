"""The listening socket for HTTP clients."""

import socket

from pdserve.config import RouterConfig
from pdserve.errors import SetupError


def listen(config: RouterConfig) -> socket.socket:
    """Return a bound socket for HTTP clients.

    It is bound before anything slow is loaded, so that a port in use is reported at once. It is created with IPPROTO_TCP
    because event loops set TCP_NODELAY only on connections whose socket states TCP, and connections inherit that from here.
    They also inherit TCP_USER_TIMEOUT, with which the kernel drops clients that do not read what is sent to them.

    Raises:
        SetupError: the address cannot be bound, for example because the port is in use.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_timeout_seconds * 1000))
        listener.bind((host, port))
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        raise SetupError(message) from error
    return listener
