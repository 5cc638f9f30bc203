"""One instance hands a prompt over to another, in turns that the test takes in place of a router."""

from collections.abc import Callable
from typing import Any

from pdserve.output import Stored
from pdserve.proto import pdserve_pb2 as pb

TOKENS = 24


def message_of(there: Any) -> "pb.HandOver | None":
    """Return what a router tells decode of prefill's output."""
    sent, there.output = there.output, None
    if sent is None:
        return None
    stored = sent.stored or Stored()
    message = pb.HandOver(num_blocks=stored.num_blocks, coming=stored.coming, final=stored.final)
    if sent.token_ids:
        message.first_token = sent.token_ids[0]
    return message


def pass_on(there: Any, decode: Any, here: Any) -> None:
    """Do what a router does with prefill's output."""
    if (message := message_of(there)) is not None:
        decode.decoder.hand_over(here, message)
        decode.run_callbacks()


def compute(prefill: Any, prompt: list[int], *, max_tokens: int = TOKENS, multi_turn: bool = True) -> "pb.HandOver":
    """Compute and store a prompt. Return what a router tells decode of it."""
    there = prefill.submit(pb.PREFILL, prompt, max_tokens, multi_turn=multi_turn)
    run(prefill, lambda: there in prefill.context.closed)
    message = message_of(there)
    assert message is not None
    return message


def take_over(
    decode: Any, prompt: list[int], message: "pb.HandOver", *, max_tokens: int = TOKENS, multi_turn: bool = True
) -> Any:
    """Compute the answer to a prompt that is in the store. Return the job."""
    here = decode.submit(pb.DECODE, prompt, max_tokens, multi_turn=multi_turn)
    decode.decoder.hand_over(here, message)
    run(decode, lambda: here.ended)
    return here


def hand_over(
    prefill: Any,
    decode: Any,
    prompt: list[int],
    between: Callable[[], None] = lambda: None,
    *,
    max_tokens: int = TOKENS,
    multi_turn: bool = True,
) -> Any:
    """Compute a prompt on one instance and its answer on another, which is run to its end. Return decode's job.

    Args:
        between: called once everything is stored.
    """
    there = prefill.submit(pb.PREFILL, prompt, max_tokens, multi_turn=multi_turn)
    here = decode.submit(pb.DECODE, prompt, max_tokens, multi_turn=multi_turn)
    run(prefill, lambda: there in prefill.context.closed)
    between()
    pass_on(there, decode, here)
    run(decode, lambda: here.ended)
    return here


def run(one: Any, is_done: Callable[[], bool]) -> None:
    """Run an instance and its transfers."""
    for _ in range(400):
        one.step()
        one.end_all()
        if is_done():
            return
    raise AssertionError("it does not end")


def alone(one: Any, prompt: list[int], max_tokens: int = TOKENS) -> Any:
    """Compute a prompt and its answer on one instance. Return the job."""
    job = one.submit(pb.BOTH, prompt, max_tokens)
    run(one, lambda: job in one.context.closed)
    return job


def answer(job: Any) -> list[int]:
    tokens: list[int] = job.seq.output.tokens[job.seq.output.num_prompt :].tolist()
    return tokens
