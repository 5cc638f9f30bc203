"""vLLM's `--speculative-config`: the settings of ours that its JSON object stands for."""

from typing import Any

from pdserve.lines.untrusted import read_json

SPECULATE = ("auto", "off", "ngram", "suffix", "draft")
# Keys of the object. The last two say in vLLM which matches to look for, and have no effect here.
KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def read_speculative(text: str) -> dict[str, Any]:
    """Return the settings that vLLM's `--speculative-config` stands for.

    Raises:
        ValueError: it asks for what is not supported.
    """
    try:
        asked = read_json(text)
    except ValueError as error:
        raise ValueError(f"--speculative-config is not JSON: {error}") from error
    if not isinstance(asked, dict) or not asked.keys() & {"method", "model"} or asked.keys() - set(KEYS):
        raise ValueError(
            f"--speculative-config needs a method or a model, and knows {', '.join(KEYS)} only, not {text}"
        )
    method, model, tokens = asked.get("method", "draft"), asked.get("model", ""), asked.get("num_speculative_tokens")
    method = "draft" if method == "draft_model" else method
    if method not in SPECULATE:
        raise ValueError(f"--speculative-config: method must be one of {', '.join(SPECULATE)}, not {method!r}")
    if not isinstance(model, str):
        raise ValueError(f"--speculative-config: model must be a directory or a hub id, not {model!r}")
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        raise ValueError(f"--speculative-config: num_speculative_tokens must be a number from 0, not {tokens!r}")
    found = {"speculate": method} | ({"speculative_model": model} if model else {})
    return found | ({} if tokens is None else {"speculative_tokens": tokens})
