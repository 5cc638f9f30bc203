"""Profile of a model on a machine: the seconds of steps, of transfers and of everything around them, as a JSON file.

`pdserve profile` writes it, and simulations and plans read it. All times are seconds, all sizes bytes, unless a name says
otherwise. The step model is finer than `pdserve.costs`, which instances fit online:

    decode     d(sequences) + context_s × context tokens
    prefill    p(tokens) + pair_s × pairs + cached_s × cached tokens + prompt_s × (prompts - 1)
    mixed      m0 + m1 × decode + m2 × prefill, and at least the longer of the two

d and p are linear between measured points ("knots") and go on straight beyond the last ones. Pairs are the (new token,
earlier token) pairs that attention computes. A sequence with one token to compute counts as decoding.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pdserve.costs import Costs, OnlineFit
from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.lines.untrusted import read_json

SCHEMA = 1
Knots = tuple[tuple[int, float], ...]  # (amount, seconds), in ascending order of the amount
ADAPTER_SHARES, ADAPTER_SHARE = ((1, 0.2), (8, 0.7), (32, 1.4), (512, 8.2)), 0.03  # of a decode step of one sequence
TABLE_SIZE = 4096  # batch sizes looked up at once


def _check_times(what: str, *times: float) -> None:
    """Raise ValueError if a time is not a number, infinite, or negative."""
    if not all(0 <= time < math.inf for time in times):
        raise ValueError(f"{what} must be finite numbers, and not negative")


def _check_knots(name: str, knots: Knots) -> None:
    """Raise ValueError if knots are none, or their amounts do not ascend, or their seconds cannot be."""
    amounts = [amount for amount, _ in knots]
    if not knots or amounts != sorted(set(amounts)) or amounts[0] < 0:
        raise ValueError(f"the knots of {name} must have ascending amounts, not {amounts}")
    _check_times(f"the seconds of {name}", *(seconds for _, seconds in knots))


@dataclass(frozen=True)
class Machine:
    """Machine on which the profile was measured; on others, times differ."""

    processor: str = ""
    threads: int = 0  # cores that an instance uses
    device: str = ""
    torch: str = ""
    numerics: str = ""  # class of `pdserve.engine.numerics`; empty for float32
    cores: int = 0  # that there are for all; 0: unknown
    contention: float = 1.0  # times as long as alone that a step takes while the other cores compute

    def __post_init__(self) -> None:
        if not 1 <= self.contention < math.inf:
            raise ValueError("contention must be a finite number, and at least 1")

    @property
    def busy_threads(self) -> int:
        """Threads that compute while an instance is in a step: on a GPU one, which launches kernels and waits for them."""
        return max(1, self.threads) if self.device in ("", "cpu") else 1


@dataclass(frozen=True)
class KVFacts:
    """Blocks of the layers of one window.

    Attributes:
        window: tokens that may attend to a token, the token itself included; 0: all later ones; `STATE_WINDOW` of keys.py:
            states of recurrent layers.
        block_bytes: of a block; of a state, which is as large with blocks of any size.
    """

    window: int
    block_bytes: int


def groups_of(layout: Layout, window: int | None) -> tuple[KVFacts, ...]:
    """Return the groups of blocks; none if there is one without a window.

    Args:
        window: of all layers, if there is one.
    """
    if len(layout.groups) == 1:
        return (KVFacts(window, layout.block_bytes),) if window else ()
    return tuple(KVFacts(group.window, group.block_bytes) for group in layout.groups)


@dataclass(frozen=True)
class EngineFacts:
    """The engine that was measured.

    Attributes:
        block_size: tokens of a block.
        block_bytes: of a block of all layers together.
        num_blocks: of each group that one sequence can have at once.
        groups: the one of the longest window first, and states last; empty: one of all layers, without a window.
        num_pages: in the pool, each as large as blocks of each group fill; 0: the pool has `num_blocks`.
    """

    block_size: int = 16
    block_bytes: int = 0
    num_blocks: int = 0
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 0
    dtype: str = ""
    groups: tuple[KVFacts, ...] = ()
    num_pages: int = 0

    def __post_init__(self) -> None:
        reaches = [one.window or math.inf for one in self.groups]
        if reaches != sorted(set(reaches), reverse=True) or any(one.block_bytes < 1 for one in self.groups):
            raise ValueError("groups must have windows of their own, the longest first, and blocks of at least 1 byte")
        if min(self.block_size, self.max_num_batched_tokens, self.max_num_seqs) < 1:
            raise ValueError("block_size, max_num_batched_tokens and max_num_seqs must be at least 1")
        if min(self.block_bytes, self.num_blocks, self.num_pages, self.max_model_len) < 0:
            raise ValueError("block_bytes, num_blocks, num_pages and max_model_len must not be negative")

    @property
    def window(self) -> int | None:
        """The window of all layers; None if some have another, or none."""
        return self.groups[0].window or None if len(self.groups) == 1 else None


@dataclass(frozen=True)
class StepModel:
    """Seconds of one forward pass; see the module for the formulas."""

    decode: Knots = ((1, 0.0101), (64, 0.0164))
    context_s: float = 0.0
    prefill: Knots = ((1, 0.0101), (2048, 0.2148))
    pair_s: float = 0.0
    cached_s: float = 0.0
    prompt_s: float = 0.0
    mixed: tuple[float, float, float] = (0.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        _check_knots("decode", self.decode)
        _check_knots("prefill", self.prefill)
        _check_times(
            "the coefficients of a step", self.context_s, self.pair_s, self.cached_s, self.prompt_s, *self.mixed[1:]
        )
        _check_times("the fixed part of a mixed step", abs(self.mixed[0]))

    def scaled(self, prefill: float, decode: float) -> "StepModel":
        """Return the model with the seconds of prefill and of decode steps multiplied by these factors."""

        def times(knots: Knots, factor: float) -> Knots:
            return tuple((amount, seconds * factor) for amount, seconds in knots)

        fixed, decode_share, prefill_share = self.mixed
        return StepModel(
            decode=times(self.decode, decode),
            context_s=self.context_s * decode,
            prefill=times(self.prefill, prefill),
            pair_s=self.pair_s * prefill,
            cached_s=self.cached_s * prefill,
            prompt_s=self.prompt_s * prefill,
            mixed=(fixed * prefill, decode_share, prefill_share),
        )

    def seconds(self, work: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step, given (tokens computed, cached tokens before them) of each sequence."""
        sequences = context = prompts = tokens = cached = 0
        pairs = 0.0
        for count, before in work:
            if count == 1:
                sequences += 1
                context += before + 1
            else:
                prompts += 1
                tokens += count
                cached += before
                pairs += count * (before + count / 2)
        return self.step_seconds(sequences, context, tokens, pairs, prompts, cached)

    def step_seconds(
        self, sequences: int, context: float, tokens: float, pairs: float, prompts: int = 1, cached: float = 0
    ) -> float:
        """Return the seconds of a step, given sums: of the decoding sequences, and of the prompts' chunks."""
        decode = self.decode_seconds(sequences, context)
        if not tokens:
            return decode
        prefill = self.prefill_seconds(tokens, pairs, prompts, cached)
        if not sequences:
            return prefill
        fixed, decode_share, prefill_share = self.mixed
        return max(decode, prefill, fixed + decode_share * decode + prefill_share * prefill)

    def decode_seconds(self, sequences: int, context: float) -> float:
        """Return the seconds of a step in which all sequences decode. Linear in the context; 0 without sequences."""
        table = self._decode_table
        if sequences < TABLE_SIZE:
            return table[sequences] + self.context_s * context
        return _interpolate(self.decode, sequences) + self.context_s * context

    @property
    def saturation(self) -> int:
        """The batch whose decode step takes twice as long as that of one sequence, without context; 0: beyond the knots."""
        limit = 2 * self.decode_seconds(1, 0)
        most = self.decode[-1][0]
        return next((batch for batch in range(1, most + 1) if self.decode_seconds(batch, 0) >= limit), 0)

    def prefill_seconds(self, tokens: float, pairs: float, prompts: int = 1, cached: float = 0) -> float:
        """Return the seconds of a step that computes parts of prompts only."""
        attention = self.pair_s * pairs + self.cached_s * cached
        return _interpolate(self.prefill, tokens) + attention + self.prompt_s * (prompts - 1)

    @cached_property
    def _decode_table(self) -> list[float]:
        return [0.0, *(_interpolate(self.decode, count) for count in range(1, TABLE_SIZE))]


@dataclass(frozen=True)
class AdapterModel:
    """Seconds that adapters (LoRA) add to a step.

    Attributes:
        rows: by how many tokens of the step have one; linear between knots, and from the first one down to 0.
        adapter_s: of each further adapter.
        load_s: of the step before which one is put into a slot.
    """

    rows: Knots = ((1, 0.0),)
    adapter_s: float = 0.0
    load_s: float = 0.0

    def __post_init__(self) -> None:
        _check_knots("adapters", self.rows)
        _check_times("the times of adapters", self.adapter_s, self.load_s)

    def seconds(self, adapters: int, rows: int) -> float:
        """Return the seconds that a number of adapters, on a number of rows, add to a step."""
        return _interpolate(self.rows, rows) + self.adapter_s * (adapters - 1) if adapters else 0.0

    @classmethod
    def assumed(cls, step: StepModel) -> "AdapterModel":
        """Return what adapters of rank 16 were measured to add, relative to a decode step: see benchmarks/adapters.py."""
        alone = step.decode_seconds(1, 0)
        return cls(tuple((rows, share * alone) for rows, share in ADAPTER_SHARES), ADAPTER_SHARE * alone)


@dataclass(frozen=True)
class DraftFacts:
    """A draft model beside the one of a profile.

    Attributes:
        model: of `--speculative-model`.
        step: of its steps, sampling included: each gives a draft of each sequence.
        num_blocks: of its pool, of as many tokens as the engine's.
        max_model_len: tokens of the longest sequence.
        engine_step_s, engine_sequence_s: seconds around these, for each step of the other model, and each sequence in it.
    """

    model: str
    step: StepModel
    num_blocks: int
    max_model_len: int
    engine_step_s: float = 0.0
    engine_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.max_model_len) < 1:
            raise ValueError("num_blocks and max_model_len of a draft model must be at least 1")
        _check_times("the times around a draft model's steps", self.engine_step_s, self.engine_sequence_s)


@dataclass(frozen=True)
class TransferModel:
    """Seconds to move KV between a pool and a store, of one operation, and the limit of all together."""

    latency_s: float = Costs.transfer[0]  # of a load
    bytes_per_s: float = 1 / Costs.transfer[1]  # of one load that has the link for itself
    store_latency_s: float = Costs.transfer[0]
    store_bytes_per_s: float = 1 / Costs.transfer[1]
    link_bytes_per_s: float = 1 / Costs.transfer[1]  # of all concurrent loads of a link

    def __post_init__(self) -> None:
        _check_times("the latencies of a transfer", self.latency_s, self.store_latency_s)
        speeds = (self.bytes_per_s, self.store_bytes_per_s, self.link_bytes_per_s)
        if not all(0 < speed < math.inf for speed in speeds):
            raise ValueError("the bytes per second of a transfer must be more than 0, and finite")

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one load alone; 0 for no bytes."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


@dataclass(frozen=True)
class Overheads:
    """Seconds that pass outside of forward passes and transfers."""

    client_s: float = 0.0  # the way between client and router, of a request and its first token together
    router_request_s: float = 1e-3  # from the request's arrival until it is sent to its instances
    router_prompt_token_s: float = 0.0  # and for each token of its prompt
    router_token_s: float = 3e-5  # of the router's thread for each token of an answer
    engine_step_s: float = 2e-4  # of the engine thread, for each step
    engine_sequence_s: float = 1e-5  # and for each sequence of the step
    frame_s: float = 2e-4  # a frame's way between router and instance

    def __post_init__(self) -> None:
        _check_times("the overheads", *vars(self).values())


@dataclass(frozen=True)
class Residuals:
    """Relative errors of a model on the measurements that it was fitted to."""

    n: int
    p50: float  # of |forecast / measured - 1|
    p90: float
    p99: float
    bias: float  # mean of forecast / measured - 1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a machine.

    Attributes:
        source: where the times come from.
        transfers: by the connector's scheme, such as "shm".
        adapters: what they add to steps; None: not measured.
        draft: of `--speculate draft`; None: not measured.
        swap: (a, b) of a + b × blocks, in one direction.
        residuals: by the name of the model.
        assumed: names of the fields that are defaults and were not measured.
        flags: of the instance that was measured, without dashes and defaults, as far as they change its times.
    """

    schema: int = SCHEMA
    model: str
    model_fingerprint: str = ""
    source: str = ""
    machine: Machine = Machine()
    engine: EngineFacts = EngineFacts()
    step: StepModel = StepModel()
    transfers: dict[str, TransferModel] = field(default_factory=dict)
    adapters: AdapterModel | None = None
    draft: DraftFacts | None = None
    swap: tuple[float, float] = Costs.swap
    start_up_s: float = 10.0
    role_flip_s: float = 0.5
    overheads: Overheads = Overheads()
    residuals: dict[str, Residuals] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile.

        Raises:
            ValueError: the file is not a profile of this schema. The text is a sentence.
            OSError: it cannot be read.
        """
        text = Path(path).read_bytes()
        try:
            raw = read_json(text)
            if not isinstance(raw, dict) or "schema" not in raw:
                raise ValueError("it has no schema")
            if raw["schema"] != SCHEMA:
                raise ValueError(f"its schema is {raw['schema']}, and this version reads schema {SCHEMA}")
            profile: Profile = _json().validate_python(raw)
        except ValueError as error:
            raise ValueError(f"{path} is not a profile: {_sentence(error)}") from None
        return profile

    @classmethod
    def load_setting(cls, flag: str, path: str) -> "Profile":
        """Read the profile that a setting names.

        Raises:
            SetupError: it cannot be read, or is not a profile.
        """
        try:
            return cls.load(path)
        except OSError as error:
            raise SetupError(f"{flag} {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise SetupError(f"{flag}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the profile.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_bytes(_json().dump_json(self, indent=2) + b"\n")

    def __post_init__(self) -> None:
        _check_times("the seconds of swap, start-up and role change", *self.swap, self.start_up_s, self.role_flip_s)

    def scaled(self, prefill: float, decode: float) -> "Profile":
        """Return the profile with the seconds of steps multiplied by these factors; of a draft model, by that of decode."""
        draft = self.draft and replace(
            self.draft, step=self.draft.step.scaled(decode, decode)
        )  # all in steps of decode
        return replace(self, step=self.step.scaled(prefill, decode), draft=draft)

    def transfer(self, scheme: str) -> TransferModel:
        """Return the model of a connector, or the default if it was not measured."""
        return self.transfers.get(scheme, TransferModel())

    @property
    def costs(self) -> Costs:
        """Cost model that an instance on this machine would report: the lines that fit this profile best.

        Its transfers are those of the first connector.
        """
        a, b = _line(self.step.prefill)
        decode_a, decode_b = _line(self.step.decode)
        transfer = next(iter(self.transfers.values()), TransferModel())
        return Costs(
            prefill=(a, b, self.step.pair_s),
            decode=(decode_a, decode_b, self.step.context_s),
            transfer=(transfer.latency_s, 1 / transfer.bytes_per_s),
            swap=self.swap,
        )


def _interpolate(knots: Knots, amount: float) -> float:
    """Return the value at `amount`: linear between knots, and beyond the last ones as between them and their neighbours.

    More never takes less time than the last knot: a slope downwards there is noise. With one knot there is no slope.
    """
    if len(knots) == 1:
        return knots[0][1]
    right = min(max(bisect_right(knots, (amount,)), 1), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    if amount > x1:
        return y1 + max(0.0, y1 - y0) * (amount - x1) / (x1 - x0)
    return max(0.0, y0 + (y1 - y0) * (amount - x0) / (x1 - x0))


def _line(knots: Knots) -> tuple[float, float]:
    """Return (a, b) ≥ 0 of the line a + b × amount with the least relative errors."""
    fit = OnlineFit(1, 0)
    for amount, seconds in knots:
        fit.calibrate((1, amount), seconds)
    a, b = fit.coefficients(0.0) or (0.0, 0.0)
    return a, b


def _sentence(error: Exception) -> str:
    """Return the first complaint of pydantic about a file, with the place in it."""
    complaints: list[dict[str, Any]] = getattr(error, "errors", list)()
    if not complaints:
        return str(error)
    place = ".".join(map(str, complaints[0]["loc"]))
    return f"{place}: {complaints[0]['msg']}".removeprefix(": ")


@cache
def _json() -> Any:
    from pydantic import TypeAdapter  # late, because a simulation needs only the data

    return TypeAdapter(Profile)
