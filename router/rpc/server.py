"""The router's gRPC server: health checks, reflection, and vLLM's engine service if its stubs are installed."""

import importlib.util
import logging
import resource

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable, install
from pdserve.interop.grpc_server import GrpcServer
from pdserve.router.backend import Backend
from pdserve.router.rpc.service import make_handler
from pdserve.router.text.tokenizer import Tokenizer
from pdserve.router.web.admission import AdmissionController
from pdserve.router.web.application import KeySet
from pdserve.router.web.grammar_checker import GrammarChecker

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024  # idle ones are closed after a minute


def make_server(
    config: RouterConfig,
    port: int,
    tokenizer: Tokenizer,
    backend: Backend,
    admission: AdmissionController,
    grammars: GrammarChecker | None = None,
) -> GrpcServer:
    """Return the server, which listens but does not serve yet.

    Health checks know "liveness", "readiness" and, with the meaning of the latter, "" and the name of the engine service.

    Raises:
        SetupError: the port is in use.
    """

    def check_readiness() -> None:
        ready, reason = backend.ready()
        if not ready:
            raise Unavailable(f"not ready: {reason}", kind="not_ready", retry_after_s=1)

    checks = {"": check_readiness, "liveness": lambda: None, "readiness": check_readiness}
    handlers = {}
    if importlib.util.find_spec("smg_grpc_proto") is None:
        log.info("gRPC: health checks only; %s adds the service VllmEngine", install("vllm-grpc"))
    else:
        from pdserve.router.rpc.vllm_engine import SERVICE, VllmEngine

        engine = VllmEngine(config, tokenizer, backend, admission, grammars)
        handlers[SERVICE.full_name] = make_handler(
            SERVICE, engine, KeySet(admission.keys), config.client_timeout_seconds
        )
        checks[SERVICE.full_name] = check_readiness
    return GrpcServer(
        (config.host, port),
        checks,
        handlers,
        max_message_bytes=config.max_body_bytes,
        certificate=(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None,
        reuse_port=config.reuse_port,
        max_connections=min(config.max_connections or MAX_CONNECTIONS, default_max_connections()),
        max_streams=config.max_requests + config.max_queue,
    )


def default_max_connections() -> int:
    """Return a sixteenth of the file descriptors that the process may open, besides those for HTTP."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit // 16))
