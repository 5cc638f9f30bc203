"""All exceptions that pdserve raises on purpose.

    PdserveError
    ├── SetupError              start-up failed: one line on stderr, exit code 2
    │   └── StoreOut                 the KV store does not answer, which may pass
    └── RequestError            ends one request; carries an HTTP status and OpenAI's error type
        ├── BadRequest          400  invalid request
        │   ├── InvalidParameter     with the name of a field
        │   ├── NotFound        404
        │   ├── TooSlow         408  the client sends its request too slowly
        │   ├── Conflict        409
        │   └── TooLarge        413
        ├── Overloaded          429  with Retry-After
        └── Unavailable         503  an instance died, is missing, or timed out

`ValueError` reports a caller's mistake in a Python call; `assert` guards internal invariants.

Who reports a RequestError to its client drops its traceback, `error.with_traceback(None)`. The frames in it hold the body of
the request, and one of them, or what it holds, often the error: only the garbage collector would free them, minutes later.
"""

from pathlib import Path

_EXTRAS = {  # package → the sentence without it, and the extra
    "grpc": ("--grpc-port and --grpc-health-port need gRPC", "grpc"),
    "mooncake": ("mooncake:// needs the package Mooncake", "mooncake"),
    "nixl": ("nixl:// needs the package NIXL", "nixl"),
    "opentelemetry": ("--otlp-endpoint needs OpenTelemetry", "otel"),
    "python_multipart": ("--batch-folder needs python-multipart", "batches"),
    "redis": ("--registry, --response-store and redis:// need Redis' client", "redis"),
    "zmq": ("--kv-events-config and --kv-events-subscribe need pyzmq", "kv-events"),
}
_EXTRAS["grpc_health"] = _EXTRAS["grpc_reflection"] = _EXTRAS["grpc"]
IS_CHECKOUT = (Path(__file__).parents[1] / "pyproject.toml").exists()  # and not an installed wheel


class PdserveError(Exception):
    """Base of all errors that pdserve raises on purpose. The text is a sentence for users."""


class SetupError(PdserveError):
    """Start-up cannot continue: for example a missing model, an unknown connector, or a port in use."""


class StoreOut(SetupError):
    """The KV store does not answer for now. Nothing says that the settings are wrong."""


class RequestError(PdserveError):
    """Ends one request. `kind` is the label in metrics and the `code` field of OpenAI's error format."""

    status = 500
    openai_type = "server_error"

    def __init__(self, message: str, *, kind: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _as_pickled, (type(self), str(self), vars(self))

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object, for the body of a response or an event of a stream."""
        fields = {"message": str(self), "type": self.openai_type, "param": self.param, "code": self.kind}
        return {"error": fields}


class BadRequest(RequestError):
    status = 400
    openai_type = "invalid_request_error"


class InvalidParameter(BadRequest):
    """The value of the field `param` is invalid, or not allowed beside others."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, kind="invalid_parameter", param=param)


class NotFound(BadRequest):
    status = 404


class Conflict(BadRequest):
    status = 409


class TooSlow(BadRequest):
    status = 408


class TooLarge(BadRequest):
    status = 413


class Overloaded(RequestError):
    status = 429
    openai_type = "rate_limit_error"


class Unavailable(RequestError):
    status = 503
    openai_type = "service_unavailable"


def not_imported(what: str, error: Exception) -> SetupError:
    """Return the error of `what` after a failed import. If an extra is missing, it says how to install that."""
    package = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if package in _EXTRAS:
        sentence, extra = _EXTRAS[package]
        return SetupError(f"{sentence}: {install(extra)}")
    return SetupError(f"{what} cannot be imported: {error}")


def reason(error: Exception) -> str:
    """Return why a file could not be read or written, without its name, which the sentence around it has already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    return f"pip install -e '.[{extra}]'" if IS_CHECKOUT else f"pip install 'pdserve[{extra}]'"


def _as_pickled(cls: type[RequestError], message: str, attributes: dict[str, object]) -> RequestError:
    """Return a pickled error; the arguments of the classes differ."""
    error = cls.__new__(cls, message)
    vars(error).update(attributes)
    return error
