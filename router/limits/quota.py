"""What one API key may ask for: requests and tokens in some time, and choices at once. The clock is the caller's.

Tokens are taken when a request comes, the prompt's and all that it may generate, and what it did not need is given back when
it ends. So a key never gets more than its rate, however many requests run at once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.errors import BadRequest, Overloaded, RequestError

ROUNDING = 1e-6  # of sums of floats
RATE_HEADERS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Rate:
    amount: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """From `10/s`, `600/min`, `1000000/h`.

        Raises:
            ValueError: it is something else.
        """
        match = re.fullmatch(r"\s*(\d{1,15})\s*/\s*(s|min|h)\s*", text)
        if match is None or not int(match[1]):
            raise ValueError(f"{text!r} is no rate; write such as 10/s, 600/min or 1000000/h")
        return cls(int(match[1]), SECONDS[match[2]])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """None: no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None  # choices, under way or waiting


class Bucket:
    """Holds a rate's amount when full, and fills steadily within its time."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._left = float(rate.amount)
        self._at = -math.inf
        self._untold = 0.0

    def left(self, now: float) -> float:
        """Below 0 while somebody holds more than a full bucket."""
        filled = self._left + (now - self._at) * self.rate.amount / self.rate.seconds
        return min(float(self.rate.amount), filled)

    def take(self, cost: float, now: float) -> None:
        """A negative cost gives back."""
        self._untold += cost
        self._left, self._at = min(float(self.rate.amount), self.left(now) - cost), now

    def tell(self) -> dict[str, float]:
        """What was taken since the last time, for the account that several routers have of it."""
        taken, self._untold = self._untold, 0.0
        return {**vars(self.rate), "taken": taken}

    def hear(self, left: float, now: float) -> None:
        """What that account has left. Of what was taken since it was told, it does not know yet."""
        self._left, self._at = min(float(self.rate.amount), left - self._untold), now

    def wait(self, cost: float, now: float) -> float:
        """Seconds until so much is there. Who wants more than the bucket holds waits until it is full."""
        missing = min(cost, self.rate.amount) - self.left(now)
        return missing * self.rate.seconds / self.rate.amount if missing > ROUNDING else 0.0

    def headers(self, what: str, now: float) -> dict[str, str]:
        """As OpenAI words them."""
        return {
            f"x-ratelimit-limit-{what}": str(self.rate.amount),
            f"x-ratelimit-remaining-{what}": str(max(0, math.floor(self.left(now)))),
            f"x-ratelimit-reset-{what}": f"{self.wait(self.rate.amount, now):.3f}s",
        }


class Quota:
    """The limits of one key and what is left of them.

    Attributes:
        choices: that it has under way or waiting.
        elsewhere: those that it has by way of other routers.
        limited: there are limits.
        stale: it may have changed here since other routers were told, or there since this one was.
    """

    def __init__(self, limits: Limits) -> None:
        self.choices = self.elsewhere = 0
        self.limited = limits != Limits()
        self._limits = limits
        self._requests = limits.requests and Bucket(limits.requests)
        self._tokens = limits.tokens and Bucket(limits.tokens)
        self._asked = False

    @property
    def stale(self) -> bool:
        return self._asked or self.choices + self.elsewhere > 0

    def refusal(self, choices: int, tokens: int, now: float) -> RequestError | None:
        """Why a request may not come now, with the seconds after which it may, or None."""
        most, under_way = self._limits.concurrency, self.choices + self.elsewhere
        self._asked = True
        if most is not None and choices > most:
            message = f"this API key may have {most} choices under way, and the request asks for {choices}"
            return BadRequest(message, kind="too_many_choices", param="n")
        if most is not None and under_way + choices > most:
            words = f"this API key has {under_way} choices under way or waiting, of {most} that it may have"
            return Overloaded(words, kind="rate_limit_concurrency", retry_after_s=1)
        if self._requests and (wait := self._requests.wait(1, now)):
            words = f"this API key may send {_worded(self._requests.rate, 'requests')}"
            return Overloaded(words, kind="rate_limit_requests", retry_after_s=math.ceil(wait))
        if self._tokens and (wait := self._tokens.wait(tokens, now)):
            words = (
                f"this API key may use {_worded(self._tokens.rate, 'tokens')}; {max(0, self._tokens.left(now)):.0f} are"
            )
            words += f" left, and this request may take {tokens}, its prompt and max_tokens"
            return Overloaded(words, kind="rate_limit_tokens", retry_after_s=math.ceil(wait))
        return None

    def take(self, choices: int, tokens: int, now: float) -> None:
        """For a request that comes."""
        self.choices += choices
        if self._requests:
            self._requests.take(1, now)
        if self._tokens:
            self._tokens.take(tokens, now)

    def give_back(self, choices: int, tokens: int, now: float) -> None:
        """Of a request that has ended: its choices, and the tokens that it did not need."""
        self._asked = True
        self.choices -= choices
        assert self.choices >= 0 and tokens >= 0, (self.choices, tokens)
        if self._tokens:
            self._tokens.take(-tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        return {name: value for what, one in self._buckets() for name, value in one.headers(what, now).items()}

    def tell(self) -> dict[str, object]:
        """For the account that several routers have of the key."""
        self._asked = False
        return {"choices": self.choices, "rates": {what: one.tell() for what, one in self._buckets()}}

    def hear(self, choices: int, left: Mapping[str, float], now: float) -> None:
        """What other routers have under way, and what is left of each rate, as far as anybody knows."""
        self.elsewhere = choices
        for what, one in self._buckets():
            if what in left:
                one.hear(left[what], now)

    def _buckets(self) -> list[tuple[str, Bucket]]:
        return [(what, one) for what, one in (("requests", self._requests), ("tokens", self._tokens)) if one]


def _worded(rate: Rate, what: str) -> str:
    unit = next(name for name, seconds in SECONDS.items() if seconds == rate.seconds)
    return f"{rate.amount} {what}/{unit}"
