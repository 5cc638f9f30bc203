"""Reads the files of data sets and traces. A malformed line is an error that names it."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pdserve.bench.requests import Request
from pdserve.errors import SetupError

BLOCK = 512  # tokens per id of `hash_ids` in a Mooncake trace, unless its lines say otherwise
MIN_SHARED_BLOCKS = 2  # more than a common system prompt: then it is a conversation


def read_mooncake(path: str, limit: int, scale: float, conversations: bool) -> list[Request]:
    """Read JSON lines of timestamp (ms), input_length, output_length, hash_ids, and optionally `block_size`, as a router
    has them at /debug/traffic.

    Args:
        scale: of the lengths.
        conversations: a request whose blocks begin with all full blocks of an earlier one waits for its answer.
    """
    ends: dict[int, int] = {}  # last full block of a request: an id stands for everything up to its end

    def parse(index: int, row: dict[str, Any]) -> Request:
        length, output = _lengths(row["input_length"], row["output_length"], scale)
        tokens = int(row.get("block_size", BLOCK))
        block = max(1, round(tokens * scale))
        ids = [int(one) for one in row["hash_ids"]]
        after = next((ends[one] for one in reversed(ids) if one in ends), None) if conversations else None
        full = min(row["input_length"] // tokens, len(ids))
        if full >= MIN_SHARED_BLOCKS:
            ends[ids[full - 1]] = index
        sizes = [max(0, min(block, length - number * block)) for number in range(len(ids))]
        blocks = [(str(one), size) for one, size in zip(ids, sizes, strict=True) if size]
        if (rest := length - sum(sizes)) > 0:
            blocks.append((f"own-{index}", rest))
        at = float(row.get("timestamp", 0)) / 1e3
        return Request(index, output, tuple(blocks), input_tokens=length, at=at, after=after)

    return _read(path, limit, _json_lines, parse)


def read_azure(path: str, limit: int, scale: float) -> list[Request]:
    """Read CSV of TIMESTAMP, ContextTokens, GeneratedTokens."""

    def parse(index: int, row: dict[str, str]) -> Request:
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        return _sized(index, at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), scale)

    return _read(path, limit, _csv_rows, parse)


def read_burstgpt(path: str, limit: int, scale: float) -> list[Request]:
    """Read CSV of Timestamp (s), Request tokens, Response tokens; rows without a response are failures and left out."""

    def parse(index: int, row: dict[str, str]) -> Request | None:
        if not int(row["Response tokens"]):
            return None
        at = float(row["Timestamp"])
        return _sized(index, at, int(row["Request tokens"]), int(row["Response tokens"]), scale)

    return _read(path, limit, _csv_rows, parse)


def read_custom(path: str, limit: int, output_tokens: int | None, conversations: bool) -> list[Request]:
    """Read JSON lines of prompt, and optionally output_tokens and the `session` whose turns wait for each other."""
    latest: dict[str, int] = {}

    def parse(index: int, row: dict[str, Any]) -> Request:
        if not isinstance(row["prompt"], str):
            raise ValueError("prompt is not a string")
        output = int(output_tokens or row.get("output_tokens", 256))
        session = str(row.get("session", ""))
        after = latest.get(session) if session and conversations else None
        latest[session] = index
        return Request(index, output, text=row["prompt"], after=after, continues=after is not None)

    return _read(path, limit, _json_lines, parse)


def read_sharegpt(
    path: str, limit: int, output_tokens: int | None, conversations: bool, count: Callable[[str], int]
) -> list[Request]:
    """Read a JSON list of conversations; without `conversations`, the first turn of each."""
    try:
        entries = json.loads(_text(path))
    except ValueError as error:
        raise SetupError(f"--dataset-path {path} is not JSON: {error}") from None
    requests: list[Request] = []
    for number, entry in enumerate(entries, 1):
        try:
            texts = [str(turn["value"]) for turn in entry["conversations"]]
        except (KeyError, TypeError) as error:
            raise SetupError(f"{path}, conversation {number}: {type(error).__name__}: {error}") from None
        previous: int | None = None
        for prompt, answer in list(zip(texts[::2], texts[1::2], strict=False))[: None if conversations else 1]:
            if len(requests) == limit:
                return requests
            output = output_tokens or count(answer)
            index = len(requests)
            requests.append(Request(index, output, text=prompt, after=previous, continues=previous is not None))
            previous = index
    return requests


def _sized(index: int, at: float, inputs: int, outputs: int, scale: float) -> Request:
    length, output = _lengths(inputs, outputs, scale)
    return Request(index, output, ((f"own-{index}", length),), input_tokens=length, at=at)


def _lengths(inputs: int, outputs: int, scale: float) -> tuple[int, int]:
    if int(inputs) < 0 or int(outputs) < 0:
        raise ValueError("a length is negative")
    return max(1, round(inputs * scale)), max(1, round(outputs * scale))


Rows = Iterator[tuple[int, Any]]


def _read(
    path: str, limit: int, rows: Callable[[str], Rows], parse: Callable[[int, Any], Request | None]
) -> list[Request]:
    requests: list[Request] = []
    line = 1
    try:
        for line, row in rows(_text(path)):  # noqa: B007  # named by the errors below
            if len(requests) == limit:
                break
            fields = _json_object(row) if isinstance(row, str) else row
            request = parse(len(requests), fields)
            if request is not None:
                requests.append(replace(request, key=str(fields.get("key") or "")))
    except KeyError as error:
        raise SetupError(f"{path}, line {line}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise SetupError(f"{path}, line {line}: {error}") from None
    return requests


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--dataset-path {path} cannot be read: {error}") from None


def _json_lines(text: str) -> Rows:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _json_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _csv_rows(text: str) -> Rows:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        yield reader.line_num, row
