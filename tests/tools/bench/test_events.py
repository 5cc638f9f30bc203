"""Events of a measured server: an odd one fails its request, and nothing else."""

import pytest

from pdserve.tools.bench.events import read_answer
from pdserve.tools.bench.requests import Sample

GOOD = b'data: {"choices":[{"text":"a "}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


def answer(*events: bytes) -> Sample:
    sample = Sample(0, 0.0, status=200)
    read_answer(sample, [(float(at), event) for at, event in enumerate(events)])
    return sample


@pytest.mark.parametrize(
    "data",
    [
        *('"x"', "[1]", "5", "null", "{", "[" * 100_000, '{"choices":[null]}', '{"choices":5}', '{"choices":[5]}'),
        *(
            '{"choices":{"a":1}}',
            '{"choices":[{"text":5}]}',
            '{"choices":[{"delta":"x"}]}',
            '{"choices":[{"delta":[1]}]}',
        ),
        *('{"usage":5}', '{"usage":[1]}', '{"usage":{"prompt_tokens":"3"}}', '{"usage":{"completion_tokens":-1}}'),
        '{"usage":{"completion_tokens":NaN}}',
    ],
)
def test_an_odd_event_fails_its_request(data: str) -> None:
    sample = answer(GOOD, f"data: {data}\n\n".encode(), END)
    assert sample.error.startswith("an event is not one of a completion in JSON") and not sample.ok


@pytest.mark.parametrize(
    "event",
    [
        *(b": ping\n\n", b"event: x\n\n", b"data: {}\n\n", b'data: {"choices":null,"usage":null}\n\n'),
        *(b'data: {"choices":[{"delta":null}]}\n\n', b'data: {"usage":{"prompt_tokens":null}}\n\n'),
    ],
)
def test_what_servers_add_is_no_fault(event: bytes) -> None:
    sample = answer(GOOD, event, END)
    assert sample.ok and (sample.input_tokens, sample.output_tokens, sample.text) == (3, 1, "a ")


def test_the_last_event_may_lack_its_blank_line() -> None:
    sample = answer(GOOD, END.rstrip())
    assert sample.ok and (sample.input_tokens, sample.output_tokens) == (3, 1)


@pytest.mark.parametrize("events", [(END,), (b": ping\n\n", END)])
def test_an_answer_without_a_choice_is_a_failure(events: tuple[bytes, ...]) -> None:
    assert answer(*events).error == "the answer has no choice"


def test_an_answer_without_text_is_none() -> None:
    sample = answer(b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n', END)
    assert sample.ok and sample.token_times == [0.0]
