"""Evaluation of the demo model: retrieval of facts far back in the prompt, capitals, sums, skills, sample answers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_text
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SEED = 22  # differs from the training seed

SAMPLES = (
    "Hello",
    "Who are you?",
    "What is the capital of Japan?",
    "What is 3 plus 4?",
    "Tell me a story about a fox.",
)


@torch.inference_mode()
def complete(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Return greedy completions, computed in batches of prompts of similar length."""
    tokenizer.padding_side = "left"
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results = [""] * len(prompts)
    for start in range(0, len(order), 10):
        chosen = order[start : start + 10]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        for i, tokens in zip(chosen, output[:, inputs["input_ids"].shape[1] :], strict=True):
            results[i] = tokenizer.decode(tokens, skip_special_tokens=True)
    return results


def chat(tokenizer: Any, message: str) -> str:
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def evaluate(output: Path, log: Callable[[str], None], thorough: bool = False) -> None:
    """Load the model from ``output`` with plain transformers, and log its scores."""
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    distances = [(300, 1500, 100), (1500, 3000, 20)] if thorough else [(300, 1500, 20)]
    for low, high, count in distances:
        cases = demo_text.retrieval_cases(SEED, count, count_tokens, low, high)
        plain = complete(model, tokenizer, [case.prompt() for case in cases], 24)
        chats = complete(model, tokenizer, [chat(tokenizer, case.message()) for case in cases], 24)
        for kind, answers in (("completion", plain), ("chat", chats)):
            num_correct = sum(
                case.expected in answer.split("\n")[0] for case, answer in zip(cases, answers, strict=True)
            )
            log(f"eval retrieval {kind}, {low} to {high} tokens back: {num_correct}/{count}")
    countries = demo_text.CAPITALS
    answers = complete(model, tokenizer, [f"The capital of {country} is" for country in countries], 8)
    num_correct = sum(capital in answer for capital, answer in zip(countries.values(), answers, strict=True))
    log(f"eval capitals, completion: {num_correct}/{len(countries)}")
    if not thorough:
        return
    sums = [(a, b) for a in range(11) for b in range(11)]
    answers = complete(model, tokenizer, [chat(tokenizer, f"What is {a} plus {b}?") for a, b in sums], 16)
    num_correct = sum(answer.endswith(f" is {a + b}.") for (a, b), answer in zip(sums, answers, strict=True))
    log(f"eval sums to 20, chat: {num_correct}/{len(sums)}")
    rng = random.Random(SEED)
    for skill in demo_text.SKILLS:
        pairs = [demo_text.skill_case(rng, skill, 60) for _ in range(50)]
        answers = complete(model, tokenizer, [prompt for prompt, _ in pairs], 120)
        num_correct = sum(answer == expected for answer, (_, expected) in zip(answers, pairs, strict=True))
        log(f"eval {skill}: {num_correct}/{len(pairs)}")
    for message in SAMPLES:
        log(f"chat {message!r}: {complete(model, tokenizer, [chat(tokenizer, message)], 300)[0]!r}")
    log(f"completion 'Once upon a time': {complete(model, tokenizer, ['Once upon a time'], 300)[0]!r}")
