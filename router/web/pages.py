"""Serves pages for browsers from this host alone: the live page, and Swagger UI for /openapi.json."""

from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.web.auth import Access

PAGE = Path(__file__).parent / "page"
SWAGGER_UI = resources.files("fastapi_offline") / "static"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(Route):
    """The route of a static file, which holds no data."""

    def __init__(self, path: str, content: bytes, media_type: str, access: Access) -> None:
        async def serve(_: Request) -> Response:
            return Response(content, headers=HEADERS, media_type=media_type)

        self.access = access
        super().__init__(path, serve)


def page_routes() -> list[PageFile]:
    """The live page is open: it asks for a key before it shows data. Swagger UI is as open as the document that it shows."""
    return [
        _file("/", PAGE / "page.html", Access.OPEN),
        _file("/page.css", PAGE / "page.css", Access.OPEN),
        _file("/page.js", PAGE / "page.js", Access.OPEN),
        _file("/docs", PAGE / "docs.html", Access.OPERATOR),
        _file("/docs/docs.js", PAGE / "docs.js", Access.OPERATOR),
        _file("/docs/swagger-ui.css", SWAGGER_UI / "swagger-ui.css", Access.OPERATOR),
        _file("/docs/swagger-ui.js", SWAGGER_UI / "swagger-ui-bundle.js", Access.OPERATOR),
    ]


def _file(path: str, file: resources.abc.Traversable, access: Access) -> PageFile:
    return PageFile(path, file.read_bytes(), TYPES[file.name.rpartition(".")[2]], access)
