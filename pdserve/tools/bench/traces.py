"""Reads the files of data sets and traces. A malformed line is an error that names it."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError, reason
from pdserve.lines.json_lines import json_lines
from pdserve.lines.untrusted import read_json
from pdserve.tools.bench.requests import Request

BLOCK = 512  # tokens per id of `hash_ids` in a Mooncake trace, unless its lines say otherwise
MAX_TOKENS = 10_000_000  # of a prompt or an answer
MAX_TIME = 1e15
ROLES = {
    **dict.fromkeys(("human", "user"), "question"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard", "model"), "answer"),
    **dict.fromkeys(("system", "tool", "function_call", "observation"), "other"),
}
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
        if turns := sorted({"session_id", "delay"} & row.keys()):
            raise ValueError(
                f"{turns[0]}: turns that wait for each other are not supported here; write them as custom lines"
            )
        given = _count(row, "input_length")
        length, output = _lengths(given, _count(row, "output_length"), scale)
        tokens = _count(row, "block_size", low=1) if "block_size" in row else BLOCK
        block = max(1, round(tokens * scale))
        ids = _ids(row, most=-(-given // tokens))
        after = next((ends[one] for one in reversed(ids) if one in ends), None) if conversations else None
        full = min(given // tokens, len(ids))
        if full >= MIN_SHARED_BLOCKS:
            ends[ids[full - 1]] = index
        sizes = [max(0, min(block, length - number * block)) for number in range(len(ids))]
        blocks = [(str(one), size) for one, size in zip(ids, sizes, strict=True) if size]
        if (rest := length - sum(sizes)) > 0:
            blocks.append((f"own-{index}", rest))
        at = _time(row.get("timestamp", 0)) / 1e3
        return Request(index, output, tuple(blocks), input_tokens=length, at=at, after=after)

    return _read(path, limit, json_lines, parse)


def read_azure(path: str, limit: int, scale: float) -> list[Request]:
    """Read CSV of TIMESTAMP, ContextTokens, GeneratedTokens. Times without a zone are UTC, which has no hour twice."""

    def parse(index: int, row: dict[str, str]) -> Request:
        time = datetime.fromisoformat(row["TIMESTAMP"])
        at = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        return _sized(index, at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), scale)

    return _read(path, limit, _csv_rows, parse)


def read_burstgpt(path: str, limit: int, scale: float) -> list[Request]:
    """Read CSV of Timestamp (s), Request tokens, Response tokens; rows without a response are failures and left out."""

    def parse(index: int, row: dict[str, str]) -> Request | None:
        if not int(row["Response tokens"]):
            return None
        at = _time(float(row["Timestamp"]))
        return _sized(index, at, int(row["Request tokens"]), int(row["Response tokens"]), scale)

    return _read(path, limit, _csv_rows, parse)


def read_custom(path: str, limit: int, output_tokens: int | None, conversations: bool) -> list[Request]:
    """Read JSON lines of prompt, and optionally output_tokens and the `session` whose turns wait for each other."""
    latest: dict[str, int] = {}

    def parse(index: int, row: dict[str, Any]) -> Request:
        if not isinstance(row["prompt"], str):
            raise ValueError("prompt is not a string")
        if not row["prompt"]:
            raise ValueError("prompt is empty")
        output = _count(row, "output_tokens", low=1) if "output_tokens" in row else 256
        output = output_tokens or output
        session = str(row.get("session", ""))
        after = latest.get(session) if session and conversations else None
        latest[session] = index
        return Request(index, output, text=row["prompt"], after=after, continues=after is not None)

    return _read(path, limit, json_lines, parse)


def read_sharegpt(
    path: str, limit: int, output_tokens: int | None, conversations: bool, count: Callable[[str], int]
) -> list[Request]:
    """Read a JSON list of conversations; without `conversations`, the first turn of each.

    A turn is what a human says and the answer to it. What a system says, an answer to nothing, and questions without an
    answer are left out.
    """
    try:
        entries = read_json(_text(path))
    except ValueError as error:
        raise SetupError(f"--dataset-path {path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise SetupError(f"--dataset-path {path} is not a list of conversations")
    requests: list[Request] = []
    for number, entry in enumerate(entries, 1):
        try:
            pairs = list(_pairs(entry["conversations"]))
        except (LookupError, TypeError, AttributeError) as error:
            raise SetupError(f"{path}, conversation {number}: {type(error).__name__}: {error}") from None
        previous: int | None = None
        for prompt, answer in pairs[: None if conversations else 1]:
            if len(requests) == limit:
                return requests
            output = output_tokens or count(answer)
            index = len(requests)
            requests.append(Request(index, output, text=prompt, after=previous, continues=previous is not None))
            previous = index
    return requests


def _pairs(turns: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the questions that have an answer, with that."""
    question = ""
    for turn in turns:
        role, text = ROLES[str(turn["from"]).lower()], turn["value"]
        if not isinstance(text, str):
            raise TypeError(f"value is {json.dumps(text)[:40]}, not a string")
        if role == "answer" and question.strip() and text.strip():
            yield question, text
        question = text if role == "question" else ""


def _count(row: dict[str, Any], name: str, low: int = 0) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_TOKENS or value % 1:
        raise ValueError(f"{name} must be a whole number from {low} to {MAX_TOKENS}, not {json.dumps(value)[:40]}")
    return int(value)


def _ids(row: dict[str, Any], most: int) -> list[int]:
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(ids) > most:
        raise ValueError(f"hash_ids has {len(ids)} blocks, and input_length fills {most} only")
    return ids


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
        raise ValueError(f"a timestamp must be a number from 0 to {MAX_TIME:g}, not {json.dumps(value)[:40]}")
    return float(value)


def _sized(index: int, at: float, inputs: int, outputs: int, scale: float) -> Request:
    length, output = _lengths(inputs, outputs, scale)
    return Request(index, output, ((f"own-{index}", length),), input_tokens=length, at=at)


def _lengths(inputs: int, outputs: int, scale: float) -> tuple[int, int]:
    for length in (inputs, outputs):
        if not 0 <= length <= MAX_TOKENS:
            raise ValueError(f"a length must be from 0 to {MAX_TOKENS}, not {length}")
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
    except (ValueError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise SetupError(f"{path}, line {line}: {error}") from None
    return requests


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--dataset-path {path} cannot be read: {reason(error)}") from None


def _json_object(line: str) -> dict[str, Any]:
    row = read_json(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _csv_rows(text: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for row in reader:
        yield reader.line_num, row
