"""Special tokens in a conversation: only the chat template writes them; in what clients send, their strings are text.

A tokenizer finds special tokens by their strings, so `<|im_end|>` in a message would end that message. A conversation with
such a string is rendered once more, with a mark inside of each; the strings that are still whole are the template's own.
These get names that a client cannot guess, the marks are removed, and a second tokenizer, which knows the special tokens by
those names only, encodes the text. It does so in one call, because a text cut into pieces can have other tokens at the cuts.
"""

import re
import secrets
from collections.abc import Callable
from typing import Any

import tokenizers

# DeepSeek's tokens that begin a turn, such as <｜User｜>, are not flagged as special.
TURN_TOKEN = re.compile(r"<｜.+｜>")


class SpecialTokens:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        strings = [token.content for token in added.values() if token.special or TURN_TOKEN.fullmatch(token.content)]
        strings = [string for string in strings if len(string) > 1]  # there is no inside in which to put a mark
        # Among tokens that begin in the same place the longest one counts, as for the tokenizer.
        alternatives = "|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or "(?!)"
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
