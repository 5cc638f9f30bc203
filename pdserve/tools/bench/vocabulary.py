"""Text of a known number of tokens: words that are one token each, so blocks can be joined in any order."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.errors import SetupError

# One token each, with the space before it, for the tokenizers of nearly all large models.
COMMON = """time people year way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour game
line end member law car city community name president team minute idea body information back parent face level office door
health person art war history party result change morning reason research girl guy moment air teacher force education"""
MAX_WORDS = 4096
OWN = "own-"  # begins the names of blocks of one request alone


@dataclass(frozen=True)
class Vocabulary:
    """Words to write prompts of. `tokenizer` counts the tokens of other text; None estimates them."""

    words: tuple[str, ...] = tuple(COMMON.split())
    tokenizer: Tokenizer | None = None

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        if self.tokenizer is None:
            return max(1, len(text) // 4)
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def write(words: Sequence[str], seed: int, name: str, tokens: int) -> str:
    """Return the first `tokens` words of the block of this name, which are the same in every process.

    A block of one request alone is not kept: thousands of long prompts would fill the memory.
    """
    if name.startswith(OWN):
        return _write(words, seed, name, tokens)
    return _write_shared(words, seed, name, tokens)


def _write(words: Sequence[str], seed: int, name: str, tokens: int) -> str:
    drawn = hashlib.shake_128(f"{seed}/{name}".encode()).digest(4 * tokens)
    numbers = (int.from_bytes(drawn[at : at + 4], "little") for at in range(0, len(drawn), 4))
    return "".join(f" {words[number % len(words)]}" for number in numbers)


_write_shared = lru_cache(maxsize=4096)(_write)


def load_vocabulary(source: str, required: bool) -> Vocabulary:
    """Return the words that are single tokens of a tokenizer.

    Args:
        source: a directory with `tokenizer.json`, or a hub id, which is asked for only if `required`.

    Raises:
        SetupError: a required tokenizer cannot be loaded.
    """
    file = Path(source) / "tokenizer.json"
    try:
        if source and file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        elif required:
            tokenizer = Tokenizer.from_pretrained(source)
        else:
            return Vocabulary()
    except Exception as error:  # noqa: BLE001  # the library raises no class of its own
        raise SetupError(f"--tokenizer {source} cannot be loaded: {error}") from None
    words = single_token_words(tokenizer)
    return Vocabulary(words, tokenizer) if len(words) >= 64 else Vocabulary(tokenizer=tokenizer)


def single_token_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return words that are one token each after a space, the most frequent first where ids are in that order."""
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [name[1:] for name, _ in ordered if re.fullmatch(r"[Ġ▁][a-z]{2,}", name)][:MAX_WORDS]
    twice = tokenizer.encode_batch([f" {word} {word}" for word in words], add_special_tokens=False)
    return tuple(word for word, one in zip(words, twice, strict=True) if len(one.ids) == 2 and one.ids[0] == one.ids[1])
