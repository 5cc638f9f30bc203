"""A streamed answer, from the pieces of its body and their times of arrival."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.bench.requests import Sample

Pieces = Sequence[tuple[float, bytes]]  # when it arrived, and what


def read_events(pieces: Pieces) -> Iterator[tuple[float, str]]:
    """Yield the data of each server-sent event with the time at which it was complete."""
    rest = b""
    for at, piece in pieces:
        *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield at, b"\n".join(data).decode(errors="replace")


def read_answer(sample: Sample, pieces: Pieces) -> None:
    """Fill in the tokens, their times and the error of an answer of either API."""
    if sample.status != 200:
        sample.error = _error_text(b"".join(piece for _, piece in pieces)) or f"HTTP {sample.status}"
        return
    done, texts = False, list[str]()
    first_event: float | None = None
    for at, data in read_events(pieces):
        if data == "[DONE]":
            done = True
            continue
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError:
            sample.error = f"an event is not JSON: {data[:100]}"
            return
        if event.get("error"):
            sample.error = _message(event["error"])
            return
        for choice in (event.get("choices") or [])[:1]:
            first_event = at if first_event is None else first_event
            delta = choice.get("delta") or {}
            text = (
                choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            )
            if text or delta.get("tool_calls"):
                sample.token_times.append(at)
                texts.append(text or "")
        if usage := event.get("usage"):
            sample.input_tokens = usage.get("prompt_tokens") or sample.input_tokens
            sample.output_tokens = usage.get("completion_tokens") or 0
    if not done:
        sample.error = "the answer ended early"
    elif not sample.token_times and first_event is not None:
        sample.token_times = [first_event]  # tokens without text
    sample.output_tokens = sample.output_tokens or len(sample.token_times)
    sample.text = "".join(texts)


def _error_text(body: bytes) -> str:
    try:
        return _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200].strip()


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
