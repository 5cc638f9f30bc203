"""Everything that can go wrong, in one tree.

    PdserveError
    ├── SetupError              start-up: one line on stderr, exit code 2
    └── RequestError            one request ends with it; carries an HTTP status and OpenAI's error type
        ├── BadRequest          400  the caller's mistake
        ├── NotFound            404
        ├── Conflict            409
        ├── TooLarge            413
        ├── Overloaded          429  with Retry-After
        └── Unavailable         503  an instance died, is not there, or ran out of time

`ValueError` is for a caller's mistake in a Python call, `assert` for our own invariants.
"""


class PdserveError(Exception):
    """The base of all errors that pdserve raises on purpose; its text is a sentence for people."""


class SetupError(PdserveError):
    """Start-up cannot go on: a missing model, an unknown connector, a port in use."""


class RequestError(PdserveError):
    """One request ends with this error. `kind` labels it in metrics and in OpenAI's `code` field."""

    status = 500
    openai_type = "server_error"

    def __init__(self, message: str, *, kind: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(RequestError):
    status = 400
    openai_type = "invalid_request_error"


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
