"""The endpoints /v1/files and /v1/batches, in OpenAI's format."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from pdserve.config import parse_size
from pdserve.errors import BadRequest, InvalidParameter, NotFound, Overloaded
from pdserve.router.api.http_responses import json_response
from pdserve.router.api.parsing import JsonBody, is_ascending, page_limit, quote
from pdserve.router.dialects.batches import schemas
from pdserve.router.dialects.batches.batch_queue import BatchQueue
from pdserve.router.dialects.batches.file_store import FILE, FileStore, Json
from pdserve.router.web.dialect import Dialect, Service
from pdserve.router.web.endpoint import Access, UnsupportedMediaType, check_not_compressed, endpoint, example

MAX_FILENAME = 255


class LengthRequired(BadRequest):
    status = 411


class Batches(Dialect):
    """Stores clients' files and answers their batches; without a folder for these, every path is a 404 that says so."""

    tag = "batches"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._opened_queue: BatchQueue | None = None
        if service.config.batch_folder:
            size, is_shared = parse_size(service.config.max_batch_bytes), len(service.admission.keys) > 1
            store = FileStore(Path(service.config.batch_folder), size, is_shared=is_shared)
            self._opened_queue = BatchQueue(store, service.config.batch_concurrency, service.endpoints)
            self.larger_bodies = {"/v1/files": size}

    def start(self) -> None:
        if self._opened_queue is not None:
            self._opened_queue.resume()

    async def close(self) -> None:
        if self._opened_queue is not None:
            await self._opened_queue.close()

    @property
    def _queue(self) -> BatchQueue:
        if self._opened_queue is None:
            message = (
                "this router keeps no files and batches; it would with --batch-folder. `pdserve batch` needs neither"
            )
            raise NotFound(message, kind="no_batches")
        return self._opened_queue

    async def _list(self, request: Request, prefix: str) -> Response:
        """Return a page of the objects whose ids begin so; the query parameters are limit, order, after and purpose."""
        store, key, query = self._queue.store, request.state.key, request.query_params
        limit, after, ascending = page_limit(query), query.get("after", ""), is_ascending(query)

        def read_page() -> Response:
            found = list[Json]()
            for item_id in sorted(store.ids(key, prefix), reverse=not ascending):
                if len(found) > limit:
                    break
                if not after or (item_id > after if ascending else item_id < after):
                    with suppress(NotFound):  # deleted in the meantime
                        item = store.load(key, item_id)
                        found += [item] if query.get("purpose", item.get("purpose")) == item.get("purpose") else []
            items = found[:limit]
            ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
            return json_response({"object": "list", "data": items, **ends, "has_more": len(found) > limit})

        return await asyncio.to_thread(read_page)

    @endpoint("POST", "/v1/files", Access.CLIENT, errors=[404, 411, 413, 415, 429], response_model=schemas.StoredFile)
    async def upload_file(self, request: Request) -> Response:
        """Store a file: a form with `file` and `purpose=batch`."""
        check_not_compressed(request)
        _check_charset(request)
        store, key, size = self._queue.store, request.state.key, _length(request)
        try:
            self.service.count(request)
            await asyncio.to_thread(store.reserve, key, size)
        except Overloaded:
            async for _ in request.stream():  # a client that is still sending would not see the answer
                pass
            raise
        try:
            return json_response(await self._store(request, store))
        finally:
            store.release(key, size)

    async def _store(self, request: Request, store: FileStore) -> Json:
        try:
            async with request.form(max_files=1, max_fields=10) as form:
                file, purpose = form.get("file"), form.get("purpose")
                unknown = form.keys() - {"file", "purpose"}
                if unknown and self.service.admission.parse_queue.unknown_fields is None:
                    message = f"unknown field {quote(min(unknown))}; the form takes file and purpose"
                    raise BadRequest(message, kind="unknown_field", param=min(unknown)[:MAX_FILENAME])
                if purpose != "batch":
                    raise InvalidParameter("purpose", 'purpose must be "batch"')
                if file is None or isinstance(file, str):
                    message = "file must be a file of the form"
                    raise BadRequest(message, kind="missing_field", param="file")
                name = (file.filename or "")[:MAX_FILENAME]
                return await asyncio.to_thread(store.add_file, request.state.key, name, "batch", file.file)
        except MultiPartException as error:
            raise BadRequest(f"the body is no form: {error.message}", kind="invalid_form") from None

    @endpoint("GET", "/v1/files", Access.CLIENT, errors=[404], response_model=schemas.StoredList)
    async def list_files(self, request: Request) -> Response:
        """Files of this API key of one `purpose`: at most `limit`, behind the file `after`; `order=asc`: the oldest first."""
        return await self._list(request, "file-")

    @endpoint("GET", "/v1/files/{file_id}", Access.CLIENT, errors=[404], response_model=schemas.StoredFile)
    async def file(self, request: Request, file_id: str) -> Response:
        """A file's name, size and purpose."""
        return json_response(self._queue.store.load(request.state.key, file_id, FILE))

    @endpoint("GET", "/v1/files/{file_id}/content", Access.CLIENT, errors=[404], response_class=Response)
    async def file_content(self, request: Request, file_id: str) -> Response:
        """A file's content."""
        store, key = self._queue.store, request.state.key
        store.load(key, file_id, FILE)
        return FileResponse(store.data_path(key, file_id), media_type="application/octet-stream")

    @endpoint("DELETE", "/v1/files/{file_id}", Access.CLIENT, errors=[404], response_model=schemas.DeletedFile)
    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Delete a file."""
        self._queue.store.delete_file(request.state.key, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @endpoint("POST", "/v1/batches", Access.CLIENT, errors=[404, 429], response_model=schemas.Batch)
    async def create_batch(
        self,
        request: Request,
        body: Annotated[
            JsonBody[schemas.BatchBody],
            example(input_file_id="file-…", endpoint="/v1/chat/completions", completion_window="24h"),
        ],
    ) -> Response:
        """Answer the requests of a file."""
        queue, key = self._queue, request.state.key
        self.service.count(request)
        fields = await self.service.read(request, schemas.BatchBody, body, _whole)
        await asyncio.to_thread(queue.store.check_room, key, 0)
        return json_response(queue.create(key, fields.input_file_id, fields.endpoint, fields.metadata or {}))

    @endpoint("GET", "/v1/batches", Access.CLIENT, errors=[404], response_model=schemas.StoredList)
    async def list_batches(self, request: Request) -> Response:
        """Batches of this API key: at most `limit`, behind the batch `after`; `order=asc`: the oldest first."""
        return await self._list(request, "batch_")

    @endpoint("GET", "/v1/batches/{batch_id}", Access.CLIENT, errors=[404], response_model=schemas.Batch)
    async def batch(self, request: Request, batch_id: str) -> Response:
        """The state of a batch, and its files of answers and errors once it has ended."""
        return json_response(self._queue.load(request.state.key, batch_id))

    @endpoint("POST", "/v1/batches/{batch_id}/cancel", Access.CLIENT, errors=[404, 409], response_model=schemas.Batch)
    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        """Stop a batch; the answers so far are its output."""
        return json_response(self._queue.cancel(request.state.key, batch_id))


def _check_charset(request: Request) -> None:
    """Raise UnsupportedMediaType for a form in another charset: decoding some takes quadratic time (punycode)."""
    from python_multipart.multipart import parse_options_header

    _, options = parse_options_header(request.headers.get("content-type"))
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        message = f"the form must be in UTF-8, not in {quote(charset)}"
        raise UnsupportedMediaType(message, kind="unsupported_content_type", param="Content-Type")


def _length(request: Request) -> int:
    """Return the length of the body, so that room can be kept for it."""
    length = request.headers.get("content-length")
    if length is None:
        raise LengthRequired("an upload needs a Content-Length, not chunks", kind="length_required")
    return int(length)


def _whole(body: schemas.BatchBody) -> schemas.BatchBody:
    return body
