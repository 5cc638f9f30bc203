"""The bytes of tokens, of tokenizers that work on bytes and of those that fall back on them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import SetupError
from pdserve.grammars.vocabulary import Vocabulary

ADDED = [
    {"id": 4, "content": "<tool>", "special": False},
    {"id": 5, "content": "<|call|>", "special": True},
    {"id": 6, "content": "</s>", "special": True},
]
NO_TEXT = [b"\xff[5]", b"\xff[6]", b"\xff[7]"]


def vocabulary(folder: Path, decoder: dict[str, Any], tokens: list[str]) -> Vocabulary:
    model = {"vocab": {token: i for i, token in enumerate(tokens)}}
    (folder / "tokenizer.json").write_text(json.dumps({"decoder": decoder, "model": model, "added_tokens": ADDED}))
    (folder / "config.json").write_text("{}")
    return Vocabulary(str(folder), 8, [6])


def test_byte_level(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, ["Ġa", "é", "ÃĊ", "Ā"])
    assert found.tokens == [b" a", b"\xe9", b"\xc3\n", b"\0", b"<tool>", *NO_TEXT]
    assert found.special == {"<|call|>": 5, "</s>": None}


def test_byte_fallback(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, {"type": "ByteFallback"}, ["▁a", "<0x0A>", "漢", "<0x>"])
    assert found.tokens == [b" a", b"\n", "漢".encode(), b"<0x>", b"<tool>", *NO_TEXT]


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="needs a tokenizer of bytes"):
        vocabulary(tmp_path, {"type": "WordPiece"}, ["a", "##b", "c", "d"])
