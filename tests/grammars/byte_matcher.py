"""Follows a grammar, of which every byte is a token."""

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.grammars.mask_worker import new_matcher

END = 256


class Bytes:
    """A vocabulary of all bytes, a token that ends outputs, and further special tokens."""

    def __init__(self, *special: str, eos: tuple[int, ...] = (END,)) -> None:
        self.tokens = [*(bytes([i]) for i in range(256)), b"\xff<|end|>", *(b"\xff" + one.encode() for one in special)]
        self.eos_token_ids, self.eos_token_id, self.bos_token_id = list(eos), eos[0], None
        self.special_token_ids = list(range(END, len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


class ByteMatcher:
    """Follows a grammar in Lark's syntax."""

    def __init__(self, grammar: str, tokenizer: LLTokenizer = TOKENIZER) -> None:
        self.matcher: LLMatcher = new_matcher(tokenizer, grammar)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def matches(self, text: str | bytes) -> bool:
        """Return whether the output may be a text."""
        tokens = list(text.encode() if isinstance(text, str) else text)
        return all(map(self.matcher.deep_copy().consume_token, [*tokens, END]))

    def accepts(self, text: str | bytes, *, ends: bool = True) -> bool:
        """Return whether the output may go on with a text and, with `ends`, end after it."""
        tokens = list(text.encode() if isinstance(text, str) else text)
        return all(map(self.matcher.consume_token, [*tokens, *([END] if ends else [])]))
