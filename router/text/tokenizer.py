"""Text to token ids and back, and the chat template: a thin layer over the model's own tokenizer."""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pdserve.errors import BadRequest, SetupError
from pdserve.model_path import resolve_model

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # of vocabularies that fall back to bytes
KNOWN_LENGTHS = 1 << 15
WORD_START = "▁"  # SentencePiece's space


def _byte_symbols() -> dict[str, bytes]:
    """GPT-2's alphabet: each byte as a character that can be printed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + i): bytes([byte]) for i, byte in enumerate(others)
    }


_BYTES = _byte_symbols()


class Tokenizer:
    """The tokenizer of one model.

    Text goes straight to the Rust tokenizer: transformers' own `encode` changes its truncation settings on each call,
    which is slower and not safe from two threads.

    Attributes:
        vocab_size: all ids that it knows are below; the model may have some more, which decode to nothing.
        eos_token_ids: what the tokenizer calls the end of a text.
        length: of the text of a token alone, in characters; of most it knows it.
        silent_ids: special tokens, which `decode` leaves out of the text.
    """

    def __init__(self, model: str | Path) -> None:
        """`model` is what `--model` takes: a directory, a hub id, or `demo`.

        Raises:
            SetupError: nothing there, or no tokenizer in it.
        """
        path = resolve_model(str(model))
        self._hf = _load(path)
        self._rust: tokenizers.Tokenizer = self._hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.vocab_size = max(self._rust.get_vocab().values()) + 1  # its length is less when ids are left out
        eos = self._hf.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset([eos])
        added = self._rust.get_added_tokens_decoder()
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.length = lru_cache(KNOWN_LENGTHS)(lambda token_id: len(self.decode([token_id])))
        decoder = json.loads(self._rust.to_str())["decoder"]
        self._byte_level = _BYTES if '"ByteLevel"' in json.dumps(decoder) else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with those that the model wants around a text (such as BOS) if `special`."""
        (encoded,) = self._rust.encode_batch_fast([text], add_special_tokens=special)  # without offsets in the text
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of the ids; bytes that form no character become U+FFFD, ids past the vocabulary nothing."""
        return self._rust.decode(ids, skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for ids past it."""
        return self._rust.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, which need not be whole characters; nothing for ids past the vocabulary."""
        piece = self.token(token_id)
        if token_id in self._added:
            return self._added[token_id]
        if self._byte_level is not None:
            return b"".join(self._byte_level.get(symbol, symbol.encode()) for symbol in piece)
        if (byte := BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace(WORD_START, " ").encode()

    @property
    def tool_format(self) -> str | None:
        """In which format the chat template teaches the model to call tools, as in `router/text/tool_calls.py`: `hermes`,
        `llama`, or None if in no known one."""
        template = self._template(tools=True)
        if "tools" not in template or "<function=" in template:
            return None
        if "<tool_call>" in template:  # which must not be a special token: those give no text
            return None if "<tool_call>" in map(self.token, self.silent_ids) else "hermes"
        return "llama" if '"parameters": ' in template else None

    def _template(self, *, tools: bool) -> str:
        """The chat template; some models have one of its own for tools."""
        known = self._hf.chat_template
        if isinstance(known, dict):
            return str(known.get("tool_use" if tools else "default") or known.get("default") or "")
        return known or ""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = True,
        tools: list[dict[Any, Any] | Callable[..., Any]] | None = None,
    ) -> list[int]:
        """The conversation through the model's chat template, up to where the assistant begins to speak.

        Raises:
            BadRequest: the model has no chat template, or the template refuses the messages.
        """
        if not self._hf.chat_template:
            message = "this model has no chat template, so it cannot chat; use /v1/completions"
            raise BadRequest(message, kind="no_chat_template", param="messages")
        spoken = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if spoken and self.tool_format is None:
            message = "this model's chat template knows no tool calls; leave out such messages"
            raise BadRequest(message, kind="invalid_messages", param="messages")
        try:
            text = self._hf.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TemplateError as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise BadRequest(message, kind="invalid_messages", param="messages") from error
        assert isinstance(text, str)
        return self.encode(text, special=False)


def _load(path: Path | str) -> PreTrainedTokenizerFast:
    if isinstance(path, Path) and not any(path.glob("*token*")) and not any(path.glob("vocab*")):
        raise SetupError(f"no tokenizer in {path}: there is no tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SetupError(f"no usable tokenizer in {path}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SetupError(
            f"no usable tokenizer in {path}: it needs a tokenizer.json, and has {type(tokenizer).__name__}"
        )
    return tokenizer
