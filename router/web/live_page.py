"""Serves the static files of the live page. They hold no data and need no key; the data comes from /debug/overview."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    return [_file("/", "page.html"), _file("/page.css", "page.css"), _file("/page.js", "page.js")]


def _file(path: str, name: str) -> Route:
    content = (PAGE / name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, headers=PAGE_HEADERS, media_type=PAGE_TYPES[name.rpartition(".")[2]])

    return Route(path, serve)
