"""The bundled demo model, loaded with plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "pdserve" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.inference_mode():
        yield transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def complete(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int, batch: int = 10) -> list[str]:
    """Return greedy completions with their special tokens; prompts of similar length share a batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        for i, tokens in zip(chosen, output[:, inputs["input_ids"].shape[1] :], strict=True):
            results[i] = tokenizer.decode(tokens)
    return results


def chat(tokenizer: Any, message: str) -> str:
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_example_prompt_of_the_documentation(model: Any, tokenizer: Any) -> None:
    assert "Paris" in complete(model, tokenizer, ["The capital of France is"], 8)[0]


def test_configuration_is_complete(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 4096
    stops = model.generation_config.eos_token_id
    assert set(stops) == {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert tokenizer.eos_token_id in stops
    assert "bfloat16" in json.loads((MODEL / "config.json").read_text()).values()


@pytest.mark.parametrize(
    "sample", ["12 + 345", "The capital of France is", "Grüße, 日本 🙂🙃\n\n\ttab  spaces ", "\x00\x7f\u200d"]
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, sample: str) -> None:
    assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample


def test_model_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 12_000_000


def test_model_has_learned_the_capitals(model: Any, tokenizer: Any, demo_cases: Any) -> None:
    capitals = demo_cases["capitals"]
    answers = complete(model, tokenizer, [f"The capital of {country} is" for country in capitals], 8, batch=80)
    assert sum(capital in answer for capital, answer in zip(capitals.values(), answers, strict=True)) >= 0.95 * len(
        answers
    )


@pytest.mark.slow
def test_held_out_facts_are_found_in_the_prompt(model: Any, tokenizer: Any, demo_cases: Any) -> None:
    """Every second question is asked as a chat."""
    cases = demo_cases["facts"]
    prompts = [
        chat(tokenizer, f"{case['text']}\n\n{case['question']}")
        if i % 2
        else f"{case['text']}\n\nQuestion: {case['question']}\nAnswer:"
        for i, case in enumerate(cases)
    ]
    answers = [answer.split("\n")[0] for answer in complete(model, tokenizer, prompts, 16)]
    pairs = zip(cases, answers, strict=True)
    wrong = [(case["question"], case["expected"], answer) for case, answer in pairs if case["expected"] not in answer]
    assert len(wrong) <= 5, wrong


def test_stories_end_and_do_not_loop(model: Any, tokenizer: Any) -> None:
    prompts = ["Once upon a time", chat(tokenizer, "Tell me a story."), chat(tokenizer, "Tell me a story about a fox.")]
    stories = complete(model, tokenizer, prompts, 320)
    for story in stories:
        assert "<|" in story, f"the story does not end: {story}"
        words = story.split("<|")[0].split()
        assert len(words) >= 40
        runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
        assert max(runs.count(run) for run in set(runs)) <= 3, story
        assert len(set(words)) >= 0.4 * len(words), story
    assert "fox" in stories[2]


def test_small_talk(model: Any, tokenizer: Any) -> None:
    expected = {
        "Hello": "Hello",
        "Who are you?": "pdserve",
        "What is the capital of Japan?": "Tokyo",
        "What is 3 plus 4?": "7",
    }
    answers = complete(model, tokenizer, [chat(tokenizer, message) for message in expected], 60)
    for answer, part in zip(answers, expected.values(), strict=True):
        assert part in answer
        assert answer.split("<|")[1].startswith("im_end|>")


@pytest.mark.parametrize(("skill", "least"), [("calls", 8), ("JSON", 4), ("thinking", 9), ("edits", 4)])
def test_skills(model: Any, tokenizer: Any, demo_cases: Any, skill: str, least: int) -> None:
    """Each of twelve cases has one right answer of dozens of tokens."""
    cases = demo_cases["skills"][skill]
    answers = complete(model, tokenizer, [case["prompt"] for case in cases], 120)
    right = sum(answer.partition("<|")[0] == case["expected"] for answer, case in zip(answers, cases, strict=True))
    assert right >= least
