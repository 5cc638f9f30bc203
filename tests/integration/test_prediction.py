"""Predicted answers over HTTP: right or wrong, they change no token, and what of them comes is computed ahead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.keys import pack_tokens
from pdserve.output import Output
from pdserve.proto import pdserve_pb2 as pb

MESSAGES = [{"role": "user", "content": "Which river flows through Rome?"}]
GREEDY: dict[str, Any] = {"thinking": {"type": "disabled"}, "temperature": 0, "ignore_eos": True, "max_tokens": 48}
SAMPLED = GREEDY | {"temperature": 0.9, "seed": 5, "n": 2}
Tokens = list[list[int]]


def ask(deployment: Any, kind: dict[str, Any], prediction: object = None) -> tuple[list[str], Tokens, dict[str, int]]:
    """Return the texts and tokens of the choices, and the details of the answer's tokens."""
    body = {"messages": MESSAGES, "return_token_ids": True, **kind}
    body |= {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    reply = httpx.post(f"{deployment.url}/v1/chat/completions", json=body, timeout=600)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    details: dict[str, int] = answer["usage"].get("completion_tokens_details", {})
    return texts, [choice["token_ids"] for choice in answer["choices"]], details


@pytest.mark.parametrize(
    ("roles", "method"),
    [({"prefill": 1, "decode": 1}, "suffix"), ({"prefill": 0, "decode": 0, "both": 1}, "ngram")],
    ids=["split", "both"],
)
def test_predictions_change_no_token(
    roles: dict[str, int], method: str, deploy: Callable[..., Any], metric: Callable[..., float]
) -> None:
    flags = {"both" if "both" in roles else "decode": ["--speculate", method, "--speculative-tokens", "4"]}
    with deploy(model="demo", dtype="bfloat16", flags=flags, **roles) as deployment:
        for kind in (GREEDY, SAMPLED):
            (text, *_), expected, details = ask(deployment, kind)
            assert set(details) <= {"reasoning_tokens"}, "a request without a prediction has no such counts"
            words = text.split(" ")
            edited = " ".join("so" if at % 9 == 5 else word for at, word in enumerate(words))
            parts = [{"type": "text", "text": part} for part in ("unlike the answer", text)]
            accepted = {}
            for name, prediction in {"right": text, "edited": edited, "later": parts, "wrong": "0 1 2 3"}.items():
                _, tokens, details = ask(deployment, kind, prediction)
                assert tokens == expected, (name, kind)
                accepted[name] = details["accepted_prediction_tokens"]
                assert details["rejected_prediction_tokens"] or name != "edited"
            assert accepted["right"] and accepted["edited"] and accepted["later"] and not accepted["wrong"]
        assert metric(deployment, "handover_fallbacks_total") == 0 == metric(deployment, "kv_transfer_failures_total")


def test_without_speculation_a_prediction_has_no_effect(deploy: Callable[..., Any]) -> None:
    with deploy(model="demo", dtype="bfloat16", speculate="off", prefill=0, decode=0, both=1) as deployment:
        (text,), expected, _ = ask(deployment, GREEDY)
        _, tokens, details = ask(deployment, GREEDY, text)
        assert tokens == expected
        assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_a_stream_that_has_moved_goes_on_with_its_prediction(
    make_instance: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    model = str(checkpoint("llama", dtype="bfloat16"))
    driver = make_instance(model=model, speculate="suffix", num_blocks=64, connector="memory://")
    prompt, size = list(range(40)), 24

    def is_over(outputs: list[Output]) -> bool:
        return bool(outputs) and outputs[-1].finish_reason is not None

    driver.submit("whole", prompt, size, pb.BOTH)
    driver.run_until(is_over)
    expected = driver.tokens("whole")
    driver.outputs.clear()
    driver.submit("moved", prompt, size, pb.BOTH, output=expected[:10], prediction=pack_tokens(expected))
    driver.run_until(is_over)
    assert driver.tokens("moved") == expected[10:]
    counts = [one.predicted for one in driver.outputs if one.request_id == "moved" and one.predicted is not None]
    accepted, rejected = (sum(getattr(one, name) for one in counts) for name in ("accepted", "rejected"))
    assert accepted > 0 == rejected, "it is where it was"
    driver.submit("strange", prompt, size, pb.BOTH, prediction=pack_tokens([2**31]))
    driver.run_until(lambda outputs: outputs[-1].error is not None)
    assert "predicted token ids go from 0 to" in driver.outputs[-1].error.message
