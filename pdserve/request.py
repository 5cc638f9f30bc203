"""Generation requests as plain data: prompt tokens and sampling parameters."""

import math
import re
from array import array
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, fields

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.keys import KEY_BYTES, Tokens, pack_tokens, token_array, unpack_tokens
from pdserve.reasoning import ReasoningSpan

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 64
MAX_BAD_WORDS = 256  # each is looked for with and without a space before it
ARRIVALS_PER_PRIORITY = 1000  # in every queue, one priority level outranks this many earlier arrivals
Count = Annotated[int, Meta(ge=0)]


class TokenLogprobs(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log probability of a token under the unmodified model: before temperature, bias, penalties and grammar.

    Attributes:
        logprob: natural logarithm, from log_softmax in float32.
        top: the most likely tokens as (id, logprob), in descending order.
        rank: of the token, 1 for the most likely; 0 if it was not asked for.
    """

    logprob: float
    top: tuple[tuple[Count, float], ...] = ()
    rank: Count = 0


if TYPE_CHECKING:
    Prompt = Sequence[int]
else:
    Prompt = array  # what it is once it is decoded
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Fields of `SamplingParams` that instances know from this version of the control protocol on only; the others all know.
SINCE: dict[str, int] = {}
PIN_SINCE = 11  # the same of `Request.pin`


class BodyParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling parameters that clients send as they are: a field here is one of every body that generates.

    Attributes:
        min_tokens: tokens to generate before a stop token is allowed.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: drop tokens less likely than this times the most likely one.
        ignore_eos: continue after EOS.
        frequency_penalty: subtracted from a token's logit for each occurrence in the output.
        presence_penalty: subtracted once from the logit of each token that occurs in the output.
        repetition_penalty: divides the positive logits of tokens in prompt and output, and multiplies the negative ones.
    """

    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    ignore_eos: bool = False
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0


class SamplingParams(BodyParams, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and stopping parameters of a request, on the wire and in the engine; see `BodyParams` for the others.

    Attributes:
        max_tokens: maximum number of tokens to generate.
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: token i of the output is a pure function of (logits, seed, i).
        stop_token_ids: stop after one of these; it stays in the output's ids, as EOS does.
        logprobs: report each token's log probability and those of this many most likely tokens; None reports nothing.
        prompt_logprobs: report the same of each token of the prompt but the first, with this many most likely tokens; None
            reports nothing.
        grammar: constraint on the output, in the form of `grammars/specification.py`; empty for none.
        logit_bias: token id → value added to its logit.
        allowed_token_ids: only these tokens are generated; empty allows all.
        bad_words: sequences of token ids that must not occur in the output, unless no other token is allowed.
        beam_width: beams of a beam search (`beam_search.py`), which replaces sampling; 0 for none.
        num_answers: how many answers the beam search returns, best first.
        length_penalty, early_stopping: of the beam search.
        logits_processors: JSON object from names of plug-ins (`logits_processors.py`) to their arguments; empty for none.
        embed: return the embedding of the prompt instead of an output.
        reasoning: how reasoning is delimited in the output, if it is limited, or a grammar begins after it.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 16
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: Annotated[tuple[tuple[int, ...], ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    beam_width: Annotated[int, Meta(ge=0, le=MAX_BEAM_WIDTH)] = 0
    num_answers: Annotated[int, Meta(ge=0, le=MAX_BEAM_WIDTH)] = 0
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    logits_processors: str = ""
    embed: bool = False
    reasoning: ReasoningSpan | None = None

    def newest_field(self) -> tuple[int, str]:
        """Return the version of the control protocol that an instance must have to know all fields that are set.

        With it comes the field that needs it: 0 and an empty name if every instance knows them.
        """
        return max([(version, name) for name, version in SINCE.items() if self._is_set(name)], default=(0, ""))

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(_DEFAULTS, name))

    def validate(self) -> None:
        """Raise InvalidParameter, with the field's name and its range, if a value is out of range."""
        if self.min_tokens > self.max_tokens >= 1:
            raise InvalidParameter("min_tokens", f"min_tokens must be from 0 to max_tokens, not {self.min_tokens}")
        try:
            msgspec.convert(asdict(self), SamplingParams)
        except msgspec.ValidationError as error:
            place = re.search(r"`\$\.(\w+)", str(error))
            assert place is not None, error
            name = place[1]
            expected = _expected(name) or str(error).partition(" - at ")[0]
            raise InvalidParameter(name, f"{name} must be {expected}, not {_shown(getattr(self, name))}") from error


_DEFAULTS = SamplingParams()


def constraints(name: str) -> list[Meta]:
    """Return the constraints on a field of `SamplingParams`: those on its value and, of a container, on the values in it."""
    found: list[Meta] = []
    types = [next(one.type for one in fields(SamplingParams) if one.name == name)]
    while types:
        annotation = types.pop()
        found += [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Meta)]
        types += [annotation.__origin__] if hasattr(annotation, "__metadata__") else get_args(annotation)
    return found


def _expected(name: str) -> str:
    """Return the range of a field, for messages."""
    parts = []
    for meta in constraints(name):
        if meta.max_length is not None:
            parts.append(f"of at most {meta.max_length} entries")
        elif meta.le is None:
            parts.append(f"at least {meta.ge}")
        else:
            low = f"above {meta.gt} and at most" if meta.ge is None else f"from {meta.ge} to"
            high = f"2^{int(meta.le).bit_length()} - 1" if meta.le > 2**30 else str(meta.le)
            parts.append(f"{low} {high}")
    return " with values ".join(parts)


def _shown(value: object) -> object:
    """Return what a message shows of a value that is out of range: of a container the largest number, or its length."""
    if isinstance(value, dict) and all(isinstance(one, float | int) for one in value.values()):
        return max(value.values(), key=lambda number: math.inf if math.isnan(number) else abs(number))
    return len(value) if isinstance(value, Sized) else value


class Tenant(NamedTuple):
    """On whose behalf a request runs, as instances know it.

    Attributes:
        id: 64 bits of a digest of the API key's name, on which routers agree.
        weight: its share of an instance, relative to those of the others.
    """

    id: int = 0
    weight: float = 1.0


NO_TENANT = Tenant()


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One prompt to be continued once, as `Submit` carries it to instances.

    Decoding checks names, types and ranges. That `packed_keys` are those of the prompt is taken from the router.

    Attributes:
        prompt: token ids, which travel as bytes: 8,000 numbers one by one would take an instance 0.3 ms.
        salt: requests with different salts never share KV.
        adapter: digest of the adapter that is added to the model's weights; empty: none is. Hello names those of an instance.
        adapter_start: position of the first token that has it; 0: all have it.
        packed_keys: hashes from which instances make the keys of blocks (`KeyChain.pack`); if empty, each computes them.
        multi_turn: a chat, so another turn may follow whose prompt begins with this prompt and its output.
        priority: lower is served first, where instances schedule by priority.
        tenant: whose request it is; instances are shared by weight.
        whole: the client reads the output at its end only, so tokens may be sent in batches.
        pin: keep the prompt's full blocks from eviction.
    """

    prompt: Prompt
    sampling: SamplingParams
    salt: str = ""
    adapter: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    adapter_start: Count = 0
    packed_keys: bytes = b""
    multi_turn: bool = False
    priority: int = 0
    tenant: Tenant = NO_TENANT
    whole: bool = False
    pin: bool = False

    def pack(self) -> bytes:
        """Return the bytes of `Submit.request`: MessagePack, of the fields that are not at their defaults."""
        fields = {name: getattr(self, name) for name in Request.__struct_fields__}
        return _ENCODER.encode(Request(**fields | {"prompt": token_array(self.prompt)}))

    @staticmethod
    def unpack(data: bytes) -> "Request":
        """Return the request in `Submit.request`. Raises ValueError: a field is unknown, or its type or range wrong."""
        return _REQUEST_DECODER.decode(data)


def _decode_prompt(_: type, value: object) -> Tokens:
    if not isinstance(value, bytes):
        raise ValueError("token ids are sent as bytes")
    return unpack_tokens(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=pack_tokens)
_REQUEST_DECODER = msgspec.msgpack.Decoder(Request, dec_hook=_decode_prompt)


def check_length(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise BadRequest if the prompt is empty, or prompt and answer do not fit into the model's context."""
    if prompt_tokens == 0:
        raise BadRequest("the prompt is empty: it has no tokens", kind="invalid_prompt", param="prompt")
    if prompt_tokens + max_tokens <= max_model_len:
        return
    problem, param = f"the prompt has {prompt_tokens}, which leaves no room for an answer", "prompt"
    if prompt_tokens < max_model_len:
        total = prompt_tokens + max_tokens
        problem = f"you asked for {total} ({prompt_tokens} in the prompt, {max_tokens} for the answer)"
        param = "max_tokens"
    message = f"this model's context is {max_model_len} tokens; {problem}"
    raise BadRequest(message, kind="context_length_exceeded", param=param)
