"""Runs the requests of a batch, a bounded number at once, and retries those that cannot be answered now."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping

from pdserve.batch.lines import BatchRequest, InvalidLine, Json, answer_line, error_line

ATTEMPTS = 60
RETRY_S = 1.0
RETRIED = (408, 429, 502, 503, 504)

# Returns status, request id and body of an answer, or raises OSError if there is none.
Send = Callable[[BatchRequest], Awaitable[tuple[int, str, Json]]]


class Unanswered(Exception):
    """A request got no answer in all attempts; the text is what the last one failed with."""


async def run_batch(
    lines: AsyncIterable[BatchRequest | InvalidLine],
    done: Mapping[int, str | None],
    send: Send,
    on_line: Callable[[Json], Awaitable[None]],
    concurrency: int,
) -> list[str]:
    """Answer all lines that are not done, and await `on_line` with each answer, in the order in which they end.

    Returns:
        Why lines have no answer: the server was overloaded or gone in all attempts. Another run can answer them.

    Raises:
        ValueError: a line that is done has another custom id.
        Exception: the first one that `on_line` or `send` raised, but for the OSErrors of `send`.
    """
    unanswered: list[str] = []
    mismatch = ""
    free = asyncio.Semaphore(concurrency)

    async def answer(request: BatchRequest) -> None:
        try:
            await on_line(await _answer(request, send))
        except Unanswered as error:
            unanswered.append(f"line {request.line}: {error}")
        finally:
            free.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            async for line in lines:
                if line.line in done:
                    if done[line.line] != line.custom_id:
                        mismatch = f"it answers line {line.line} as {done[line.line]!r}, which is of another batch"
                        break
                elif isinstance(line, InvalidLine):
                    await on_line(error_line(line))
                else:
                    await free.acquire()
                    tasks.create_task(answer(line))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if mismatch:
        raise ValueError(mismatch)
    return unanswered


async def _answer(request: BatchRequest, send: Send) -> Json:
    """Return the line of the answer. Raises Unanswered."""
    failure = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(RETRY_S)
        try:
            status, request_id, body = await send(request)
        except OSError as error:
            failure = f"the server does not answer: {error}"
            continue
        if status not in RETRIED:
            return answer_line(request, status, request_id, body)
        failure = f"status {status}: {body}"
    raise Unanswered(failure)
