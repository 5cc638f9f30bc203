"""Limits of one API key: requests per time, tokens per time, and concurrent choices. The caller supplies the clock.

Tokens are taken when a request arrives: its prompt and the most that it may generate. The unused part is returned when the
request ends. A key therefore never exceeds its rate, however many requests run at once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.errors import BadRequest, Overloaded, RequestError

ROUNDING = 1e-6  # tolerance for sums of floats
RATE_HEADERS = [
    f"x-ratelimit-{field}-{unit}" for field in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
]
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Rate:
    """An amount per period."""

    amount: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """Parse `10/s`, `600/min` or `1000000/h`.

        Raises:
            ValueError: the text has another form, or the amount is 0.
        """
        match = re.fullmatch(r"\s*(\d{1,15})\s*/\s*(s|min|h)\s*", text)
        if match is None or not int(match[1]):
            raise ValueError(f"{text!r} is not a rate; write for example 10/s, 600/min or 1000000/h")
        return cls(int(match[1]), SECONDS[match[2]])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The configured limits of a key; None means unlimited."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None  # choices, running or queued


class TokenBucket:
    """Token bucket of one rate: holds at most the rate's amount and refills evenly over its period."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._level = float(rate.amount)
        self._updated_at = -math.inf
        # Taken so far in all, now, at the last report, and at the last one that was confirmed.
        self._total = self._reported = self._confirmed = 0.0

    def available(self, now: float) -> float:
        """Return the current level; below 0 while one request holds more than a full bucket."""
        filled = self._level + (now - self._updated_at) * self.rate.amount / self.rate.seconds
        return min(float(self.rate.amount), filled)

    def take(self, cost: float, now: float) -> None:
        """Take `cost`; a negative cost returns it."""
        self._total += cost
        self._level, self._updated_at = min(float(self.rate.amount), self.available(now) - cost), now

    def report(self) -> dict[str, float]:
        """Return the rate and what was taken so far, for the account that routers share.

        The account charges what it has not seen in an earlier report: an exchange that fails, or whose answer is lost, is
        simply repeated. An account that knows of no earlier report charges what was taken since the last confirmed one.
        """
        self._reported = self._total
        return {**vars(self.rate), "total": self._total, "confirmed": self._confirmed}

    @property
    def is_confirmed(self) -> bool:
        """True if the account has been charged for everything."""
        return self._confirmed == self._total

    def update(self, available: float, now: float) -> None:
        """Confirm the last report: set the level to the shared account's, less what was taken here since then."""
        self._confirmed = self._reported
        self._level, self._updated_at = min(float(self.rate.amount), available - (self._total - self._confirmed)), now

    def wait(self, cost: float, now: float) -> float:
        """Return the seconds until `cost` is available; a cost above the capacity needs a full bucket."""
        missing = min(cost, self.rate.amount) - self.available(now)
        return missing * self.rate.seconds / self.rate.amount if missing > ROUNDING else 0.0

    def headers(self, unit: str, now: float) -> dict[str, str]:
        """Return OpenAI's rate-limit headers for this bucket."""
        return {
            f"x-ratelimit-limit-{unit}": str(self.rate.amount),
            f"x-ratelimit-remaining-{unit}": str(max(0, math.floor(self.available(now)))),
            f"x-ratelimit-reset-{unit}": f"{self.wait(self.rate.amount, now):.3f}s",
        }


class Quota:
    """The limits of one key and its current use.

    Attributes:
        choices: choices of the key that are running or queued on this router.
        remote_choices: its choices on other routers.
        is_limited: True if any limit is configured.
    """

    def __init__(self, limits: Limits) -> None:
        self.choices = self.remote_choices = 0
        self.is_limited = limits != Limits()
        self._limits = limits
        self._requests = limits.requests and TokenBucket(limits.requests)
        self._tokens = limits.tokens and TokenBucket(limits.tokens)
        self._used_since_report = False

    @property
    def needs_sync(self) -> bool:
        """True if the use may have changed, here or on another router, since the last exchange."""
        is_confirmed = all(bucket.is_confirmed for _, bucket in self._buckets())
        return self._used_since_report or not is_confirmed or self.choices + self.remote_choices > 0

    def refusal(self, choices: int, tokens: int, now: float) -> RequestError | None:
        """Return the error for a request that exceeds a limit, with the seconds until a retry can succeed, or None."""
        limit, in_use = self._limits.concurrency, self.choices + self.remote_choices
        self._used_since_report = True
        if limit is not None and choices > limit:
            message = f"this API key allows {limit} concurrent choices, and the request asks for {choices}"
            return BadRequest(message, kind="too_many_choices", param="n")
        if limit is not None and in_use + choices > limit:
            message = f"this API key has {in_use} choices running or queued and allows {limit}"
            return Overloaded(message, kind="rate_limit_concurrency", retry_after_s=1)
        if self._requests and (wait := self._requests.wait(1, now)):
            message = f"this API key allows {_describe(self._requests.rate, 'requests')}"
            return Overloaded(message, kind="rate_limit_requests", retry_after_s=math.ceil(wait))
        if self._tokens and (wait := self._tokens.wait(tokens, now)):
            available = max(0, self._tokens.available(now))
            message = (
                f"this API key allows {_describe(self._tokens.rate, 'tokens')}, of which {available:.0f} are left; "
                f"this request may use {tokens} (its prompt and max_tokens)"
            )
            return Overloaded(message, kind="rate_limit_tokens", retry_after_s=math.ceil(wait))
        return None

    def take(self, choices: int, tokens: int, now: float) -> None:
        """Charge an arriving request."""
        self.choices += choices
        if self._requests:
            self._requests.take(1, now)
        if self._tokens:
            self._tokens.take(tokens, now)

    def give_back(self, choices: int, tokens: int, now: float) -> None:
        """Return the choices of a request that has ended and the tokens that it did not use."""
        self._used_since_report = True
        self.choices -= choices
        assert self.choices >= 0 and tokens >= 0, (self.choices, tokens)
        if self._tokens:
            self._tokens.take(-tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """Return OpenAI's rate-limit headers for all limited rates."""
        return {name: value for unit, bucket in self._buckets() for name, value in bucket.headers(unit, now).items()}

    def report(self) -> dict[str, object]:
        """Return the use so far, for the account that routers share. Confirmed by `update`, or else repeated."""
        self._used_since_report = False
        return {"choices": self.choices, "rates": {unit: bucket.report() for unit, bucket in self._buckets()}}

    def keep(self) -> None:
        """Count the last report as failed: another follows, and until then the choices of other routers are unknown."""
        self._used_since_report, self.remote_choices = True, 0

    def update(self, choices: int, left: Mapping[str, float], now: float) -> None:
        """Apply the shared account: the choices on other routers and the level of each rate."""
        self.remote_choices = choices
        for unit, bucket in self._buckets():
            if unit in left:
                bucket.update(left[unit], now)

    def _buckets(self) -> list[tuple[str, TokenBucket]]:
        buckets = (("requests", self._requests), ("tokens", self._tokens))
        return [(unit, bucket) for unit, bucket in buckets if bucket]


def _describe(rate: Rate, unit: str) -> str:
    period = next(name for name, seconds in SECONDS.items() if seconds == rate.seconds)
    return f"{rate.amount} {unit}/{period}"
