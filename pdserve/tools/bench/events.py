"""A streamed answer, from the pieces of its body and their times of arrival."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.lines.event_stream import EventReader
from pdserve.lines.untrusted import read_json
from pdserve.tools.bench.requests import Sample

Pieces = Sequence[tuple[float, bytes]]  # when it arrived, and what


def read_events(pieces: Pieces) -> Iterator[tuple[float, str]]:
    """Yield the data of each server-sent event with the time at which it was complete; the last may lack its blank line."""
    reader = EventReader()
    for at, piece in (*pieces, *((at, b"\n\n") for at, _ in pieces[-1:])):
        for data in reader.feed(piece):
            yield at, data


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
            event: dict[str, Any] = read_json(data)
            if event.get("error"):
                sample.error = _message(event["error"])
                return
            for choice in (event.get("choices") or [])[:1]:
                first_event = at if first_event is None else first_event
                if (text := _text_of(choice)) is not None:
                    sample.token_times.append(at)
                    texts.append(text)
            if usage := event.get("usage"):
                sample.input_tokens = _count(usage, "prompt_tokens") or sample.input_tokens
                sample.output_tokens = _count(usage, "completion_tokens")
        except (ValueError, TypeError, AttributeError, LookupError):
            sample.error = f"an event is not one of a completion in JSON: {data[:100]}"
            return
    if not done:
        sample.error = "the answer ended early"
    elif first_event is None:
        sample.error = "the answer has no choice"
    elif not sample.token_times:
        sample.token_times = [first_event]  # tokens without text
    sample.output_tokens = sample.output_tokens or len(sample.token_times)
    sample.text = "".join(texts)


def _text_of(choice: dict[str, Any]) -> str | None:
    """Return the text that a choice of an event brings; None if it brings no token."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    if not isinstance(text, str):
        raise TypeError("the text is no string")
    return text if text or delta.get("tool_calls") else None


def _count(usage: dict[str, Any], name: str) -> int:
    count = usage.get(name) or 0
    if not isinstance(count, int) or count < 0:
        raise TypeError(f"{name} is no count")
    return count


def _error_text(body: bytes) -> str:
    try:
        return _message(read_json(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200].strip()


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
