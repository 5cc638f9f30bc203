"""Tokenization, detokenization and chat templates: a thin wrapper around the model's own tokenizer."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pdserve.errors import BadRequest, SetupError
from pdserve.grammars.vocabulary import byte_characters
from pdserve.model_path import resolve_model
from pdserve.router.text.parsers.registry import AUTO, choose_parsers

WORD = re.compile(r"\w+")
# DeepSeek's tokens that begin a turn, such as <｜User｜>, are not flagged as special.
TURN_TOKEN = re.compile(r"<｜.+｜>")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a single byte, in vocabularies with byte fallback
LENGTH_CACHE_SIZE = 1 << 15
WORD_START = "▁"  # SentencePiece's space
# Tokens before the prefix, between prefix and suffix, and behind the suffix.
FILL_IN_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
REASONING_VARIABLES = ("reasoning_content", "reasoning", "thinking")  # of a message; each template knows one of them
RESERVED_VARIABLES = (
    frozenset(  # of a chat template, which have other fields, or are arguments of `apply_chat_template`
        {
            "messages",
            "conversation",
            "tools",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
        }
        | {
            "tokenize",
            "padding",
            "truncation",
            "max_length",
            "return_tensors",
            "return_dict",
            "tokenizer_kwargs",
            "self",
        }
        | {"return_assistant_tokens_mask"}
    )
)


_BYTE_SYMBOLS = {character: bytes([byte]) for character, byte in byte_characters().items()}


@dataclass(frozen=True)
class TemplateOptions:
    """Settings with which a conversation is rendered.

    Attributes:
        add_generation_prompt: append the header of the assistant's turn.
        continue_final_message: leave the last message's turn open, so that the answer continues it.
        variables: further variables for the chat template.
        template: a chat template in place of the model's; empty: the model's.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    template: str = ""


PLAIN = TemplateOptions()


class Tokenizer:
    """The tokenizer of one model.

    Calls the Rust tokenizer directly: transformers' `encode` changes its truncation settings on each call, which is slower
    and not thread-safe.

    Attributes:
        vocab_size: exclusive upper bound of the tokenizer's ids. The model may have further ids, which decode to nothing.
        unused_ids: those below that the vocabulary skips; they decode to nothing either.
        eos_token_ids: the tokenizer's end-of-sequence id; empty if it has none.
        special_ids: special tokens, which `decode` omits by default.
        parsers: those of the model's reasoning and tool calls.
        decode: function (ids, skip_special_tokens=True) that returns their text. Bytes that form no character become U+FFFD;
            ids past the vocabulary add nothing.
        text_length: function from a token id to the number of characters that it decodes to on its own, cached.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        special_tokens_in_messages: bool = False,
        trust_request_chat_template: bool = False,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """Load the tokenizer of `model`: a directory, a hub id, or `demo`, as for `--model`.

        With `special_tokens_in_messages`, `render_chat` reads the strings of special tokens in messages and tools as
        special tokens, as transformers does; otherwise they are ordinary text. With `trust_request_chat_template` it takes
        templates of clients, which run in a sandbox, but as long as they like.

        Raises:
            SetupError: there is no such model or no such parser, or the model has no usable tokenizer.
        """
        path = resolve_model(str(model))
        self._hf = _load(path)
        self._labels = _labels(Path(path))
        self._rust: tokenizers.Tokenizer = self._hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.decode: Callable[..., str] = self._rust.decode
        used = self._rust.get_vocab().values()
        self.vocab_size = max(used) + 1
        self.unused_ids = frozenset(range(self.vocab_size)).difference(used)
        eos = self._hf.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset([eos])
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.text_length = lru_cache(LENGTH_CACHE_SIZE)(lambda token_id: len(self.decode([token_id])))
        self._trusts_templates = trust_request_chat_template
        self._special_tokens = None if special_tokens_in_messages else SpecialTokens(self._rust)
        self.parsers = choose_parsers(
            tool_call_parser,
            reasoning_parser,
            self._template(tools=True),
            self._template(tools=False),
            {token.content: token_id for token_id, token in added.items() if token.special},
        )
        decoder = json.loads(self._rust.to_str())["decoder"]
        self._byte_symbols = _BYTE_SYMBOLS if '"ByteLevel"' in json.dumps(decoder) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the model's BOS and the like if `add_special_tokens` is set."""
        # The fast variant does not compute character offsets.
        (encoded,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def encode_pair(self, query: str, document: str) -> list[int]:
        """Return the token ids of a pair of texts for a cross-encoder.

        A chat template with the roles `query` and `document` renders them, as in vLLM; without one, the tokenizer joins them.
        """
        if all(re.search(f"""['"]{role}['"]""", self._template(tools=False)) for role in ("query", "document")):
            turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return self.render_chat(turns, options=TemplateOptions(add_generation_prompt=False))
        (encoded,) = self._rust.encode_batch_fast([(query, document)])
        ids: list[int] = encoded.ids
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None if there is none."""
        return self._rust.token_to_id(token)

    def fill_in_middle(self, prefix: Sequence[int], suffix: str) -> list[int]:
        """Return the prompt whose continuation goes between `prefix`, with or without a BOS token, and `suffix`.

        Raises:
            BadRequest: the model has no tokens for this.
        """
        sets = ([one for name in names if (one := self.token_id(name)) is not None] for names in FILL_IN_MIDDLE)
        found = next((ids for ids in sets if len(ids) == 3), None)
        if found is None:
            message = "suffix needs a model with tokens for filling in the middle, which this one has not; leave it out"
            raise BadRequest(message, kind="unsupported_parameter", param="suffix")
        start, hole, end = found
        bos = prefix[:1] if prefix[:1] == [self._hf.bos_token_id] else []
        return [*bos, start, *prefix[len(bos) :], hole, *self.encode(suffix, add_special_tokens=False), end]

    def id_to_token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; empty for an id past the vocabulary."""
        return self._rust.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token decodes to, which may be part of a character; empty past the vocabulary."""
        piece = self.id_to_token(token_id)
        if token_id in self._added:
            return self._added[token_id]
        if self._byte_symbols is not None:
            return b"".join(self._byte_symbols.get(symbol, symbol.encode()) for symbol in piece)
        if (byte := BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace(WORD_START, " ").encode()

    def effort_variables(self, effort: str, template: str = "") -> dict[str, Any]:
        """Return the variables of a chat template (the model's by default) for a reasoning effort.

        A template that can only turn thinking on and off, such as Qwen3's, has it on unless the effort is `none`.
        """
        words = self._words(template)
        if "reasoning_effort" not in words and "enable_thinking" in words:
            return {"enable_thinking": effort != "none"}
        return {"reasoning_effort": effort}

    def label(self, number: int) -> str:
        """Return the name of a class, if the model is a classifier."""
        return self._labels.get(str(number), f"LABEL_{number}")

    @cached_property
    def knows_effort(self) -> bool:
        """True if the chat template has a variable for the reasoning effort."""
        return "reasoning_effort" in self._words()

    @cached_property
    def strips_reasoning(self) -> bool:
        """True if the chat template leaves reasoning out of earlier turns, so that the next prompt does not contain it."""
        thought = "reasoning that a template may leave out"
        turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        turns[1] |= dict.fromkeys(REASONING_VARIABLES, thought)
        try:
            text = self._apply_template([*turns, turns[0]], None, TemplateOptions())
        except BadRequest:
            return True
        return thought not in text

    @cached_property
    def _appends_arguments(self) -> bool:
        """True if the chat template appends the arguments of earlier calls as strings, as DeepSeek's do, not as objects."""
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            self._apply_template(turns, None, TemplateOptions())
        except BadRequest:
            return True
        return False

    def thinking_variables(self, template: str = "", *, is_on: bool) -> dict[str, Any]:
        """Return the variables with which a chat template turns reasoning on or off; empty if it cannot."""
        return {name: is_on for name in ("enable_thinking", "thinking") if name in self._words(template)}

    def _words(self, template: str = "", *, tools: bool = False) -> frozenset[str]:
        """Return the words of a chat template (the model's by default), among which are the names of its variables."""
        text = template or self._template(tools=tools)
        return self._own_words.get(text) or frozenset(WORD.findall(text))

    @cached_property
    def _own_words(self) -> dict[str, frozenset[str]]:
        return {text: frozenset(WORD.findall(text)) for text in (self._template(tools=one) for one in (False, True))}

    def _template(self, *, tools: bool) -> str:
        """Return the chat template; some models have a separate one for requests with tools."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            return str(template.get("tool_use" if tools else "default") or template.get("default") or "")
        return template or ""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None,
        options: TemplateOptions = PLAIN,
    ) -> list[int]:
        """Return the token ids of the conversation, rendered through the chat template.

        `tools` are shown to the model as JSON schemas.

        Raises:
            BadRequest: the model has no chat template, the template supports no tools, has no such variable, or rejects the
                messages, or requests must not bring a template.
        """
        if options.template or options.variables:
            self._check_template_options(options, uses_tools=bool(tools))
        if not (options.template or self._hf.chat_template):
            message = "this model has no chat template; use /v1/completions"
            raise BadRequest(message, kind="no_chat_template", param="messages")
        uses_tools = has_calls = False
        for turn in messages:
            has_calls |= "tool_calls" in turn
            uses_tools |= has_calls or turn["role"] == "tool"
        if uses_tools and self.parsers.tools is None:
            message = "this model's chat template does not support tool calls; leave out messages that contain them"
            raise BadRequest(message, kind="invalid_messages", param="messages")
        if has_calls and self._appends_arguments:
            messages = list(map(_with_arguments_as_text, messages))
        text = self._apply_template(messages, tools, options)
        if self._special_tokens is None or not self._special_tokens.occur_in([messages, tools, options.variables]):
            return self.encode(text, add_special_tokens=False)
        mark = str(secrets.randbits(64))  # digits, because templates change neither their case nor their JSON
        values = self._special_tokens.mark([messages, tools, options.variables], mark)
        marked = self._apply_template(values[0], values[1], replace(options, variables=values[2]))
        if marked.replace(mark, "") != text:
            message = (
                "the messages or tools contain the string of a special token where this model's chat template interprets "
                "it; leave it out"
            )
            raise BadRequest(message, kind="invalid_messages", param="messages")
        return self._special_tokens.encode(marked, mark)

    def _check_template_options(self, options: TemplateOptions, *, uses_tools: bool) -> None:
        """Raise BadRequest if the options ask for what the template does not know, or a client must not decide."""
        if options.template and not self._trusts_templates:
            message = "chat_template needs a router with --trust-request-chat-template; leave it out"
            raise BadRequest(message, kind="unsupported_parameter", param="chat_template")
        words = self._words(options.template, tools=uses_tools)
        for name in options.variables:
            if name in RESERVED_VARIABLES or name not in words or not name.isidentifier():  # then it has no effect
                param = name if name == "reasoning_effort" else "chat_template_kwargs"
                message = f"this model's chat template has no variable {name[:100]!r}; leave it out"
                raise BadRequest(message, kind="unsupported_parameter", param=param)

    def _apply_template(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, options: TemplateOptions
    ) -> str:
        owner = "this request's" if options.template else "the model's"
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                tools=tools or None,
                chat_template=options.template or None,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.variables,
            )
        except TemplateError as error:
            message = f"{owner} chat template rejects these messages: {error}"
            raise BadRequest(message, kind="invalid_messages", param="messages") from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Of expressions in a template, with values that it does not expect, or of a message that cannot be continued.
            message = f"{owner} chat template fails: {' '.join(str(error).split())[:300] or type(error).__name__}"
            raise BadRequest(message, kind="invalid_messages", param="messages") from error
        assert isinstance(text, str)
        return text


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    functions = [call["function"] for call in calls]
    texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
    pairs = zip(calls, texts, strict=True)
    return {**message, **({"tool_calls": [{**call, "function": text} for call, text in pairs]} if calls else {})}


def _labels(path: Path) -> dict[str, str]:
    """Return the names of a classifier's classes by their numbers; empty if the model's configuration has none."""
    config = path / "config.json"
    return (json.loads(config.read_text()).get("id2label") if config.is_file() else None) or {}


def _load(path: Path | str) -> PreTrainedTokenizerFast:
    if isinstance(path, Path) and not any(path.glob("*token*")) and not any(path.glob("vocab*")):
        raise SetupError(f"no tokenizer in {path}: there is no tokenizer.json")
    try:
        tokenizer = (_auto_tokenizer() if needs_torch(path) else PreTrainedTokenizerFast).from_pretrained(path)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SetupError(f"no usable tokenizer in {path}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SetupError(
            f"no usable tokenizer in {path}: a tokenizer.json is needed, but this is a {type(tokenizer).__name__}"
        )
    return tokenizer


def needs_torch(path: Path | str) -> bool:
    """Return whether loading this tokenizer imports torch, for seconds, as what finds the class of any tokenizer does."""
    settings, model = (_json(Path(path) / name) for name in ("tokenizer_config.json", "config.json"))
    return settings.get("tokenizer_class") != "TokenizersBackend" or model.get("model_type") != "llama"


def _auto_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is none, or something else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class SpecialTokens:
    """The special tokens of one tokenizer: only the chat template writes them; in what clients send, their strings are text.

    A tokenizer finds special tokens by their strings, so `<|im_end|>` in a message would end that message. A
    conversation with such a string is rendered once more, with a mark inside of each; the strings that are still whole
    are the template's own. These get names that a client cannot guess, the marks are removed, and a second tokenizer,
    which knows the special tokens by those names only, encodes the text. It does so in one call, because a text cut
    into pieces can have other tokens at the cuts.

    Thread-safe.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        strings = [token.content for token in added.values() if token.special or TURN_TOKEN.fullmatch(token.content)]
        strings = [string for string in strings if len(string) > 1]  # there is no inside in which to put a mark
        alternatives = longest_of(strings) or "(?!)"
        self._pattern = re.compile(alternatives)
        self._first_character = re.compile(f"(?=(?:{alternatives})).", re.DOTALL)
        secret = secrets.token_hex(8)
        self._names = {string: f"<{secret}:{number}>" for number, string in enumerate(strings)}
        self._renamed = _share(tokenizer)
        # New tokens are numbered from the number of tokens in the model. These fill the numbers that others already have.
        known = max(tokenizer.get_vocab().values(), default=-1) + 1
        fillers = [f"<{secret}/{number}>" for number in range(len(tokenizer.get_vocab(with_added_tokens=False)), known)]
        self._renamed.add_tokens(fillers)
        self._renamed.add_tokens([self._rename(token) for token in added.values()])
        self._ids: dict[int, int] = {}  # of the second tokenizer → of the tokenizer
        self._pieces: dict[str, list[int]] = {}
        for token_id, token in added.items():
            name = self._names.get(token.content, token.content)
            renamed_id = self._renamed.token_to_id(name)
            assert renamed_id is not None
            self._ids[renamed_id] = token_id
            if name != token.content and token_id in _model_ids(tokenizer, token.content):
                parts = (token.content[:1], token.content[1:])
                self._pieces[token.content] = [piece for part in parts for piece in _model_ids(tokenizer, part)]

    def occur_in(self, value: object) -> bool:
        """Return True if a string in the value, made of lists, dicts and plain values, contains that of a special token."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                if self._pattern.search(item) is not None:
                    return True
            elif isinstance(item, dict):
                pending += item.keys()
                pending += item.values()
            elif isinstance(item, list | tuple):
                pending += item
        return False

    def mark(self, value: Any, mark: str) -> Any:
        """Return the value with `mark` after the first character of each special token's string."""
        return _map_strings(lambda text: self._first_character.sub(lambda match: match[0] + mark, text), value)

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the token ids of the text without its marks; strings with a mark inside become ordinary text."""
        named = self._pattern.sub(lambda match: self._names[match[0]], text).replace(mark, "")
        if not self._pieces:  # a third of the time, without offsets and tokens
            (encoded,) = self._renamed.encode_batch_fast([named], add_special_tokens=False)
            return [self._ids.get(token_id, token_id) for token_id in encoded.ids]
        # A model whose own vocabulary has the special token's string may find it in text too.
        encoded = self._renamed.encode(named, add_special_tokens=False)
        tokens = zip(encoded.ids, encoded.tokens, strict=True)
        return [i for token_id, token in tokens for i in self._pieces.get(token, [self._ids.get(token_id, token_id)])]

    def _rename(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(
            self._names.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )


def longest_of(texts: Sequence[str]) -> str:
    """Return the regular expression of the longest of some texts that begins at a place, as a tokenizer takes its tokens.

    What several begin with is in it once: one after the other, a thousand would be tried at each character.
    """
    parts = []
    for _, group in groupby(sorted(filter(None, texts)), key=lambda text: text[0]):
        first, *others = group
        pairs = zip(
            first, others[-1] if others else first, strict=False
        )  # all begin with what first and last begin with
        shared = next((i for i, (one, other) in enumerate(pairs) if one != other), len(first))
        parts.append(re.escape(first[:shared]) + longest_of([text[shared:] for text in (first, *others)]))
    joined = "|".join(parts)
    return f"(?:{joined}){'?' if '' in texts else ''}" if len(parts) > 1 or ("" in texts and joined) else joined


def _share(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer without added tokens that shares the other parts, which may be large."""
    shared = tokenizers.Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        shared.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        shared.pre_tokenizer = tokenizer.pre_tokenizer
    return shared


def _model_ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return [token.id for token in tokenizer.model.tokenize(text)]


def _map_strings(change: Callable[[str], str], value: Any) -> Any:
    """Return the value with `change` applied to each of its strings, including the keys of its dicts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(change, item) for item in value]
    return value
