"""Data sets and traces, and the text that is made of them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import SetupError
from pdserve.model_path import DEMO
from pdserve.tools.bench.datasets import load_requests
from pdserve.tools.bench.requests import Request
from pdserve.tools.bench.vocabulary import Vocabulary, load_vocabulary, write
from pdserve.tools.load_config import BenchServeConfig

ROOT = Path(__file__).parents[3]


def load(name: str, path: Path | str = "", **settings: Any) -> list[Request]:
    config = BenchServeConfig(dataset_name=name, dataset_path=str(path), **settings)
    return load_requests(config, lambda low, high: high, lambda text: len(text.split()))


def text_of(request: Request, seed: int = 0) -> str:
    words = Vocabulary().words
    return "".join(write(words, seed, name, tokens) for name, tokens in request.blocks)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def row(at: float, length: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": ids}


def test_random_prompts_share_the_prefix_and_nothing_else() -> None:
    one, other = load("random", num_prompts=2, random_prefix_len=10, random_input_len=30)
    assert one.input_tokens == 40 and len(text_of(one).split()) == 40
    assert text_of(one).split()[:10] == text_of(other).split()[:10]
    assert text_of(one).split()[10:] != text_of(other).split()[10:]
    assert text_of(one) != text_of(one, seed=1)


def test_lengths_stay_within_the_range() -> None:
    (one,) = load("random", num_prompts=1, random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    assert (one.input_tokens, one.output_tokens) == (150, 15)


def test_prefix_repetition_draws_one_of_the_prefixes() -> None:
    requests = load("prefix_repetition", num_prompts=3, prefix_repetition_num_prefixes=4)
    assert {one.blocks[0] for one in requests} == {("prefix-3", 256)}


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=2), st.integers(0, 511))
def test_texts_share_exactly_the_blocks_that_ids_share(tmp_path_factory: Any, ids: list[list[int]], rest: int) -> None:
    path = lines(tmp_path_factory.mktemp("t") / "t", *(row(0, 512 * len(one) - rest, *one) for one in ids))
    requests = load("mooncake", path, trace_length_scale=1 / 64)
    shared = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
    first, second = (text_of(one).split() for one in requests)
    whole = min(8 * shared, len(first), len(second))
    assert first[:whole] == second[:whole]
    assert [len(text_of(one).split()) for one in requests] == [one.input_tokens for one in requests]


def test_a_mooncake_turn_waits_for_the_request_that_it_extends(tmp_path: Path) -> None:
    path = lines(tmp_path / "t", row(0, 1100, 0, 1, 2), row(10, 1030, 0, 3, 4), row(2000, 2000, 0, 1, 5, 6))
    assert [one.after for one in load("mooncake", path, multi_turn=True)] == [None, None, 0]
    assert [one.after for one in load("mooncake", path)] == [None, None, None]
    assert [one.at for one in load("mooncake", path)] == [0, 0.01, 2]


def test_csv_traces(tmp_path: Path) -> None:
    azure = lines(
        tmp_path / "a",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = load("azure", azure)
    assert (first.input_tokens, second.output_tokens) == (374, 109)
    assert second.at is not None and first.at is not None and second.at - first.at == pytest.approx(4.314579, abs=1e-5)
    burst = lines(tmp_path / "b", "Timestamp,Model,Request tokens,Response tokens", "5,ChatGPT,472,18", "45,x,7,0")
    (only,) = load("burstgpt", burst)
    assert (only.at, only.input_tokens, only.output_tokens) == (5.0, 472, 18)


def test_times_of_a_trace_do_not_depend_on_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local clocks leave out an hour of a night in spring, and have one of a night in autumn twice."""
    monkeypatch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
    time.tzset()
    try:
        times = ["2023-03-12 01:59:30", "2023-03-12 03:00:30", "2023-11-05 01:30:00", "2023-11-05 02:30:00Z"]
        rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{one},374,44" for one in times)]
        at = [one.at or 0.0 for one in load("azure", lines(tmp_path / "a", *rows))]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert at[1] - at[0] == 3660 and at[3] - at[2] == 3600


def test_a_trace_may_name_the_api_key_of_each_request(tmp_path: Path) -> None:
    azure = lines(tmp_path / "a", "TIMESTAMP,ContextTokens,GeneratedTokens,key", "2023-11-16 18:15:46,374,44,chat")
    mooncake = lines(tmp_path / "m", row(0, 600, 0, 1) | {"key": "batch"}, row(1, 600, 0, 2))
    assert [one.key for one in load("azure", azure) + load("mooncake", mooncake)] == ["chat", "batch", ""]


def test_conversations(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}] * 2
    path = lines(tmp_path / "s", [{"conversations": turns}])
    assert [(one.after, one.continues) for one in load("sharegpt", path, multi_turn=True)] == [(None, False), (0, True)]
    assert [one.output_tokens for one in load("sharegpt", path)] == [2]
    rows = [{"prompt": "a", "session": "x"}, {"prompt": "b", "output_tokens": 3}, {"prompt": "c", "session": "x"}]
    custom = load("custom", lines(tmp_path / "c", *rows), multi_turn=True)
    assert [(one.after, one.output_tokens) for one in custom] == [(None, 256), (None, 3), (0, 256)]


def test_of_sharegpt_what_humans_say_is_asked(tmp_path: Path) -> None:
    def said(*turns: str) -> dict[str, Any]:
        return {"conversations": [dict(zip(("from", "value"), turn.split(": "), strict=True)) for turn in turns]}

    rows = [
        said("system: you are helpful", "human: one", "gpt: a b"),
        said("gpt: and so on", "user: two", "assistant: c"),
        said("human: left out", "human: three", "gpt: d e f", "human: without answer"),
        said("human: failed", "gpt: "),
        said("gpt: none"),
    ]
    path = lines(tmp_path / "s", rows)
    for conversations in (False, True):
        found = [(one.text, one.output_tokens) for one in load("sharegpt", path, multi_turn=conversations)]
        assert found == [("one", 2), ("two", 1), ("three", 3)]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_lines_end_at_line_feeds_only(tmp_path: Path, character: str) -> None:
    prompt = f"a{character}b"
    text = json.dumps({"prompt": prompt}, ensure_ascii=False) + "\r\n" + json.dumps({"prompt": "c"})
    (tmp_path / "t").write_bytes(text.encode())
    assert [one.text for one in load("custom", tmp_path / "t")] == [prompt, "c"]
    table = f'TIMESTAMP,ContextTokens,GeneratedTokens,key\r\n2023-11-16,3,4,"x{character}y"\r\n'
    (tmp_path / "a").write_bytes(table.encode())
    assert [one.key for one in load("azure", tmp_path / "a")] == [f"x{character}y"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("mooncake", [row(0, 5, 0), "{"], "t, line 2: Expecting"),
        ("mooncake", [row(0, 5, 0), "", "[1]"], "t, line 3: not a JSON object"),
        ("mooncake", [row(0, -5, 0)], "t, line 1: input_length must be a whole number from 0 to 10000000, not -5"),
        ("mooncake", [row(0, 5, 0), row(0, 9, 0) | {"input_length": float("nan")}], "t, line 2: input_length must be"),
        (
            "mooncake",
            ['{"timestamp":0,"input_length":1e400,"output_length":1,"hash_ids":[]}'],
            "t, line 1: input_length must",
        ),
        ("mooncake", [row(0, 5, 0) | {"input_length": "5"}], "t, line 1: input_length must be"),
        ("mooncake", [row(0, 5, 0) | {"output_length": True}], "t, line 1: output_length must be"),
        ("mooncake", [row(0, 5, 0) | {"block_size": 0}], "t, line 1: block_size must be a whole number from 1"),
        ("mooncake", [row(0, 5, 0) | {"block_size": -16}], "t, line 1: block_size must be"),
        ("mooncake", [row(0, 5, 0) | {"hash_ids": 7}], "t, line 1: hash_ids must be a list"),
        ("mooncake", [row(0, 20, 0, 1)], "t, line 1: hash_ids has 2 blocks, and input_length fills 1 only"),
        ("mooncake", [row(float("nan"), 5, 0)], "t, line 1: a timestamp must be a number from 0"),
        ("mooncake", [row(float("inf"), 5, 0)], "t, line 1: a timestamp must be a number from 0"),
        ("mooncake", [row(-1, 5, 0)], "t, line 1: a timestamp must be a number from 0"),
        (
            "mooncake",
            [row(0, 5, 0) | {"session_id": "s", "delay": 5}],
            "t, line 1: delay: turns that wait for each other",
        ),
        ("mooncake", ["[" * 100_000], "t, line 1: "),
        ("mooncake", [{"timestamp": 0}], "t, line 1: the field 'input_length' is missing"),
        ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "soon,1,2"], "t, line 2: Invalid isoformat string"),
        ("azure", ["a,b", "1,2"], "t, line 2: the field 'TIMESTAMP' is missing"),
        (
            "azure",
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,-1,2"],
            "t, line 2: a length must be",
        ),
        ("burstgpt", ["Timestamp,Request tokens,Response tokens", "1,2"], "t, line 2: int"),
        ("burstgpt", ["Timestamp,Request tokens,Response tokens", "nan,2,2"], "t, line 2: a timestamp must be"),
        ("custom", [{"prompt": 5}], "t, line 1: prompt is not a string"),
        ("custom", [{"prompt": ""}], "t, line 1: prompt is empty"),
        ("custom", [{"prompt": "a", "output_tokens": 0}], "t, line 1: output_tokens must be a whole number from 1"),
        ("custom", [{"prompt": "a", "output_tokens": -5}], "t, line 1: output_tokens must be"),
        ("sharegpt", [5], "t is not a list of conversations"),
        ("sharegpt", [[5]], "t, conversation 1: TypeError"),
        (
            "sharegpt",
            [[{"conversations": [{"from": "human", "value": None}]}]],
            "t, conversation 1: TypeError: value is null",
        ),
        (
            "sharegpt",
            [[{"conversations": [{"from": "narrator", "value": "a"}]}]],
            "t, conversation 1: KeyError: 'narrator'",
        ),
        ("custom", [], "t contains no requests"),
        ("sharegpt", ["["], "t is not JSON"),
        ("sharegpt", [[{"conversations": []}, {}]], "t, conversation 2: KeyError"),
    ],
)
def test_a_malformed_file_is_one_line_with_the_place(tmp_path: Path, name: str, rows: list[Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        load(name, lines(tmp_path / "t", *rows))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SetupError, match=r"--dataset-path nowhere cannot be read: No such file or directory$"):
        load("azure", "nowhere")
    with pytest.raises(SetupError, match="--dataset-name azure needs --dataset-path"):
        load("azure")


def test_words_of_a_tokenizer_are_one_token_each_in_any_order() -> None:
    vocabulary = load_vocabulary(str(DEMO), required=True)
    assert vocabulary.tokenizer is not None and len(vocabulary.words) > 200
    text = write(vocabulary.words, 1, "a", 100) + write(vocabulary.words, 1, "b", 50)
    assert vocabulary.count(text) == 150


def test_an_unknown_tokenizer_is_refused_only_if_asked_for(tmp_path: Path) -> None:
    assert load_vocabulary(str(tmp_path), required=False).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match=r"--tokenizer .* cannot be loaded"):
        load_vocabulary(str(tmp_path), required=True)


def test_only_texts_that_requests_share_are_kept() -> None:
    """4,096 prompts of 100,000 tokens would take 2.4 GB in each client process."""
    words = Vocabulary().words
    assert write(words, 1, "prefix", 50) is write(words, 1, "prefix", 50)
    own = [write(words, 1, "own-7", 50) for _ in range(2)]
    assert own[0] == own[1] and own[0] is not own[1]
