"""Serves pages for browsers from this host alone: the live page, and Swagger UI for /openapi.json."""

from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.errors import install
from pdserve.router.web.endpoint import Access

PAGE = Path(__file__).parent / "page"
FILES = ("page.css", "page.js", "charts.js", "format.js", "panels.js", "snapshots.js")
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STRICT_POLICY = f"{POLICY}; require-trusted-types-for 'script'"  # Swagger UI inserts sanitized HTML as strings
HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class PageFile(Route):
    """The route of a static file, which holds no data."""

    access = Access.OPEN
    id_prefix = "req-"

    def __init__(self, path: str, file: Traversable, policy: str) -> None:
        content = file.read_bytes().replace(b"INSTALL_SWAGGER", install("swagger").encode())  # in no_docs.html
        media_type = TYPES[file.name.rpartition(".")[2]]

        async def serve(_: Request) -> Response:
            return Response(content, headers={"Content-Security-Policy": policy, **HEADERS}, media_type=media_type)

        super().__init__(path, serve)
        self.answer = self.app


def page_routes() -> list[PageFile]:
    """Return the routes of all files. They are open, since a browser sends no key when it opens a page.

    The live page asks for a key before it shows data; in Swagger UI, "Authorize" takes the keys that "Execute" sends.
    """
    live_page = {f"/{name}": PAGE / name for name in FILES}
    live_page["/"] = PAGE / "page.html"
    swagger_ui: dict[str, Traversable] = {"/docs": PAGE / "no_docs.html"}
    if find_spec("fastapi_offline") is not None:
        files = resources.files("fastapi_offline") / "static"
        swagger_ui = {
            "/docs": PAGE / "docs.html",
            "/docs/docs.js": PAGE / "docs.js",
            "/docs/swagger-ui.css": files / "swagger-ui.css",
            "/docs/swagger-ui.js": files / "swagger-ui-bundle.js",
        }
    return [
        *(PageFile(path, file, STRICT_POLICY) for path, file in live_page.items()),
        *(PageFile(path, file, POLICY) for path, file in swagger_ui.items()),
    ]
