"""The two nouns of a benchmark: a request to be sent, and the sample that it became."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load.

    Attributes:
        blocks: the prompt as (name, tokens): each name stands for a fixed sequence of tokens, so prompts that begin with the
            same names share a prefix. Prompts become text when they are sent: those of a long trace would fill the memory.
        text: the prompt itself, from datasets that have one.
        at: seconds after the beginning; None until arrival times are given.
        after: index of the previous turn of the conversation. The request waits for its answer.
        continues: the previous prompt and its answer precede this prompt.
        key: name of the API key that sent it; empty: unknown. For SLOs of `pdserve plan`; all are sent with `--api-key`.
        adapter: name of the adapter that a simulation gives it; empty: none.
    """

    index: int
    output_tokens: int
    blocks: tuple[tuple[str, int], ...] = ()
    text: str = ""
    input_tokens: int = 0
    at: float | None = None
    after: int | None = None
    continues: bool = False
    key: str = ""
    adapter: str = ""


@dataclass(slots=True)
class Sample:
    """Result of one request. Times are in seconds since the beginning of the run.

    Attributes:
        scheduled: when it was due; a later turn is due when the previous one has been answered.
        queued: seconds for which it waited for `--max-concurrency`.
        sent: when the client began to send it.
        token_times: when the events with text arrived.
        status: of HTTP; 0 if there was none.
        key: of the request.
    """

    index: int
    scheduled: float
    queued: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    status: int = 0
    error: str = ""
    text: str = ""
    request_id: str = ""
    key: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def rejected(self) -> bool:
        return self.status == 429

    @property
    def lag(self) -> float:
        """Seconds by which the client itself was late."""
        return self.sent - self.scheduled - self.queued

    @property
    def ttft(self) -> float:
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is no other, as in vLLM."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    def values(self, metric: str) -> list[float]:
        """Return what the request adds to the distribution of a metric, `ttft`, `tpot`, `itl` or `e2el`, in seconds."""
        if metric == "itl":
            return self.itls
        if metric == "tpot":
            return [self.tpot] if self.output_tokens > 1 else []
        return [self.ttft if metric == "ttft" else self.latency]


T = TypeVar("T", Request, Sample)


def counted(items: Iterable[T], warmup: int) -> list[T]:
    """Return the requests, or their samples, without the first `warmup` ones of the load."""
    return [one for one in items if one.index >= warmup]


def failures(samples: Iterable[Sample]) -> list[str]:
    """Return the errors of failed requests with how many had each; those that differ only in numbers count as one."""
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.ok:
            kinds.setdefault(re.sub(r"[0-9.]+", "0", sample.error), []).append(sample)
    return [f"{same[0].error} (status {same[0].status}; requests: {len(same)})" for same in kinds.values()]
