"""Log probabilities as OpenAI words them: one form for completions, another for chat."""

from collections.abc import Sequence

from pdserve.request import TokenLogprobs
from pdserve.router.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not know


def of_completion(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], starts: Sequence[int]
) -> dict[str, object]:
    """`starts`: where in the choice's text each token begins, in characters. The chosen token is always among the top."""
    chosen = [(_text(tokenizer.token_bytes(token_id)), one) for token_id, one in zip(ids, logprobs, strict=True)]
    return {
        "tokens": [text for text, _ in chosen],
        "token_logprobs": [_finite(one.logprob) for _, one in chosen],
        "top_logprobs": [
            {_text(tokenizer.token_bytes(top_id)): _finite(value) for top_id, value in one.top}
            | {text: _finite(one.logprob)}
            for text, one in chosen
        ],
        "text_offset": list(starts),
    }


def of_chat(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, object]:
    content = [
        {
            **_entry(tokenizer, token_id, one.logprob),
            "top_logprobs": [_entry(tokenizer, top_id, value) for top_id, value in one.top],
        }
        for token_id, one in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    spelled = tokenizer.token_bytes(token_id)
    return {"token": _text(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}


def _text(spelled: bytes) -> str:
    """A token that holds part of a character is named by its bytes, as OpenAI does it: `bytes:\\xe2\\x80`."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
