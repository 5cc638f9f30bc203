"""Schemas of /v1/files and /v1/batches: their bodies and answers."""

from typing import Any, Literal

from pydantic import ConfigDict

from pdserve.router.api.answers import Answer
from pdserve.router.api.parsing import Body
from pdserve.router.api.schemas import Metadata, Short


class BatchBody(Body):
    """Fields of /v1/batches."""

    input_file_id: Short
    endpoint: Short
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class StoredFile(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Batch(Answer):
    """A batch, whose further fields say when it reached which status."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    status: Literal["validating", "in_progress", "cancelling", "cancelled", "completed", "failed"]
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]


class StoredList(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool
