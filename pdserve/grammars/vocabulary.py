"""The bytes of a tokenizer's tokens, read from its `tokenizer.json` without any library for tokenizers."""

import json
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError
from pdserve.model_path import model_folder

SPECIAL = b"\xff"  # begins the names of special tokens, which are no text, as llguidance wants them


class Vocabulary:
    """A tokenizer as llguidance takes it.

    Args:
        model: directory, hub id or `demo`, as for `--model`.
        vocab_size: tokens that the model may sample; some of them may have no text.

    Attributes:
        tokens: bytes of each token.
        special: ids of the special tokens by their strings; None for those that end an output.

    Raises:
        SetupError: the tokenizer neither works on bytes nor falls back on them.
    """

    def __init__(self, model: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        tokenizer = _load(model)
        to_bytes = _decoder(tokenizer)
        vocab = tokenizer["model"]["vocab"]
        texts = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        tokens = {token_id: to_bytes(text) for text, token_id in texts}
        added = tokenizer.get("added_tokens", ())
        tokens |= {token["id"]: token["content"].encode() for token in added if not token["special"]}
        self.special: dict[str, int | None] = {
            token["content"]: None if token["id"] in eos_token_ids else token["id"]
            for token in added
            if token["special"] and token["content"]
        }
        no_text = {token["id"] for token in added if token["special"]} | {*eos_token_ids}
        self.tokens = [
            tokens[token_id] if tokens.get(token_id) and token_id not in no_text else SPECIAL + f"[{token_id}]".encode()
            for token_id in range(vocab_size)
        ]
        self.eos_token_ids = sorted(eos_token_ids)
        self.eos_token_id, self.bos_token_id = self.eos_token_ids[0], None
        self.special_token_ids: list[int] = []  # llguidance knows them by their names

    def __call__(self, text: str) -> list[int]:
        """Return a tokenization, for which llguidance asks, although grammars do not use it: see OPTIONS."""
        by_byte = self._by_byte
        return [by_byte[byte] for byte in text.encode() if byte in by_byte]

    @cached_property
    def _by_byte(self) -> dict[int, int]:
        return {token[0]: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}


def _load(model: str) -> Any:
    path = Path(model_folder(model)) / "tokenizer.json"
    if path.is_file():
        return json.loads(path.read_bytes())
    from transformers import AutoTokenizer  # takes seconds to import; it converts other files

    return json.loads(AutoTokenizer.from_pretrained(path.parent).backend_tokenizer.to_str())


def _decoder(tokenizer: Any) -> Any:
    """Return the function from a token's string to its bytes."""
    kinds = set(_kinds(tokenizer.get("decoder")))
    if "ByteLevel" in kinds:
        table = byte_characters()
        return lambda text: bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        return _with_fallback
    raise SetupError("structured output needs a tokenizer of bytes, or one that falls back on them")


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


def _with_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def byte_characters() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level BPE, as in GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
