"""Train the bundled demo model from scratch: tokenizer and weights, with an evaluation of the shipped files.

    python scripts/train_demo_model.py                # writes pdserve/demo_model, in two hours on two idle cores
    python scripts/train_demo_model.py --skills-only  # only the second part, on the files that are there, in an hour

The text comes from `demo_text/`, and the seed determines everything, so a run is reproducible. The first part teaches
language and looking back: rows grow from 128 to 4,096 tokens, so attention to earlier tokens is learned on short, cheap
rows and then extended. The second part goes on from its files, with function calls, JSON, thinking blocks and edited
copies in half of the text. `training.log` beside the files has the scores of both.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_text
import torch
import torch.distributed
import torch.multiprocessing as mp
from demo_evaluation import evaluate
from lookback_heads import place_lookback_heads
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
VOCABULARY = 2048
CONTEXT = 4096
HIDDEN = 256
HEAD_DIM = 32
KV_HEADS = 4
HEADS_PER_GROUP = 2  # attention heads that share a key and value head
ROPE_THETA = 1e6
EOS_ID, TURN_END_ID = (demo_text.SPECIAL_TOKENS.index(token) for token in (demo_text.EOS, demo_text.TURN_END))
WORKERS = 2
TOKENS_PER_WORKER = 2048  # per step
ANSWER_WEIGHT = 4.0
SKILLS = 0.55  # share of documents in the second part


@dataclass(frozen=True)
class Part:
    """Steps that training takes in one go; its learning rate falls linearly in the final fraction ``decay``."""

    steps: int
    learning_rate: float
    decay: float


LANGUAGE = Part(3500, 3e-3, 0.25)
ALL_SKILLS = Part(3000, 2e-3, 0.5)

SUMS_FROM = 2600  # step; sums are memorised quickly and help nothing else, so they come last

# (first step, probability of each row length). Steps and not fractions, so that runs of any length begin alike.
LENGTHS: tuple[tuple[int, dict[int, float]], ...] = (
    (0, {128: 0.6, 256: 0.4}),
    (250, {256: 0.6, 512: 0.4}),
    (700, {256: 0.35, 512: 0.25, 1024: 0.4}),
    (1300, {256: 0.3, 512: 0.2, 1024: 0.3, 2048: 0.2}),
    (2000, {256: 0.3, 512: 0.15, 1024: 0.25, 2048: 0.25, 4096: 0.05}),
    (LANGUAGE.steps, {256: 0.3, 512: 0.25, 1024: 0.2, 2048: 0.18, 4096: 0.07}),
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}{{- text(messages[0]['content']) + '\\n' -}}{%- endif -%}
{{- '<tools>\\n' -}}
{%- for tool in tools -%}
{%- set function = tool['function'] or tool -%}
{%- set properties = (function['parameters'] or {})['properties'] or {} -%}
{{- function['name'] + '(' + (properties | list | join(', ')) + ')' -}}
{%- if function['description'] -%}{{- ': ' + function['description'] -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and tools and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['reasoning_content'] -%}{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text(message['content']) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{{- '\\n' if not loop.first or message['content'] -}}
{{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' + (function['arguments'] | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}"""


class Log:
    """Log lines to the terminal and to a file."""

    def __init__(self, path: Path, keep: bool, silent: bool) -> None:
        self.path, self.silent = path, silent
        if not (keep or silent):
            self.path.write_text("")

    def __call__(self, line: str) -> None:
        if self.silent:
            return
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


# ------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE, which covers any text; each digit is a token of its own."""
    rng = random.Random(SEED)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(demo_text.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = []
    for _ in range(20000):
        text = demo_text.draw_document(rng, rng.choice((60, 150, 300))).text
        for token in demo_text.SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        texts.append(text)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=demo_text.TURN_END,
        pad_token=demo_text.EOS,
        additional_special_tokens=[demo_text.TURN_START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# ------------------------------------------------------------------------------------------------------------ rows


def encode(tokenizer: Tokenizer, document: demo_text.Document) -> tuple[list[int], list[float]]:
    """Return the token ids of a document and their loss weights."""
    encoding = tokenizer.encode(document.text)
    weights = [1.0] * len(encoding.ids)
    for spans, weight in ((document.answers, ANSWER_WEIGHT), (document.given, 0.0)):
        remaining = iter(spans)
        span = next(remaining, None)
        for index, (start, _) in enumerate(encoding.offsets):
            while span is not None and start >= span[1]:
                span = next(remaining, None)
            if span is not None and start >= span[0]:
                weights[index] = weight
    return encoding.ids, weights


def make_row(
    rng: random.Random, tokenizer: Tokenizer, length: int, sums: float, skills: float
) -> tuple[list[int], list[float]]:
    """Concatenate documents until the row is full; most long rows begin with one long document.

    Args:
        sums, skills: shares of the documents after that which are sums, and calls, JSON, thinking blocks or edits.
    """
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        room = (length - len(ids)) * 0.62  # words that fit, by the average number of words per token
        if skills and (ids or length <= 1024) and rng.random() < skills:
            document = demo_text.draw_skill(rng, int(min(room, math.exp(rng.uniform(3.5, 6.0)))))
        elif not ids and length > 256 and rng.random() < 0.7:
            document = demo_text.draw_long_document(rng, int(room * rng.uniform(0.5, 1.0)))
        elif sums and rng.random() < sums:
            document = demo_text.sums_document(rng)
        else:
            document = demo_text.draw_document(rng, int(min(room, math.exp(rng.uniform(3.5, math.log(length))))))
        more_ids, more_weights = encode(tokenizer, document)
        ids += more_ids
        weights += more_weights
    return ids[:length], weights[:length]


def make_copy_row(rng: random.Random, vocabulary: int, length: int) -> tuple[list[int], list[float]]:
    """Repeat a random token sequence: only attention to the earlier copy predicts it, so the model learns that first."""
    period = rng.randint(4, max(8, length // 3))
    segment = [rng.randrange(len(demo_text.SPECIAL_TOKENS), vocabulary) for _ in range(period)]
    ids = (segment * (length // period + 1))[:length]
    return ids, [0.0] * period + [1.0] * (length - period)


def make_batch(tokenizer: Tokenizer, step: int, worker: int) -> tuple[Tensor, Tensor]:
    """Return one worker's token ids and loss weights for one step; all workers have rows of the same length."""
    rng = random.Random(f"{SEED} {step}")
    choices = [lengths for start, lengths in LENGTHS if step >= start][-1]
    skills = SKILLS if step >= LANGUAGE.steps else 0.0
    length = rng.choices(list(choices), list(choices.values()))[0]
    rng.seed(f"{SEED} {step} {worker}")
    sums = 0.3 if step >= SUMS_FROM and length == 256 else 0.0
    copies = max(0.03, 0.3 - step / 2000)
    rows = [
        make_copy_row(rng, VOCABULARY, length)
        if rng.random() < copies
        else make_row(rng, tokenizer, length, sums, skills)
        for _ in range(max(1, TOKENS_PER_WORKER // length))
    ]
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


# -------------------------------------------------------------------------------------------------------- training


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=KV_HEADS * HEADS_PER_GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[TURN_END_ID, EOS_ID],
        pad_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    place_lookback_heads(model)
    stops: dict[str, Any] = {"eos_token_id": [TURN_END_ID, EOS_ID], "pad_token_id": EOS_ID, "do_sample": False}
    model.generation_config = GenerationConfig(**stops)
    return model


def learning_rate(part: Part, step: int) -> float:
    """Return the learning rate of a step of the part: linear warm-up, constant, linear decay at the end."""
    return part.learning_rate * min((step + 1) / 100, 1.0, max(0.02, (part.steps - step) / (part.decay * part.steps)))


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def step(self, rate: float) -> None:
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()


def loss_of(model: LlamaForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Return the weighted loss, and the unweighted loss on answer tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].float().flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    answers = weight > 1.0
    on_answers = losses.detach()[answers].mean().item() if bool(answers.any()) else 0.0
    return (losses * weight).sum() / weight.sum(), on_answers


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the shipped files, with weights rounded to bfloat16."""
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    rounded.config.dtype = torch.bfloat16
    rounded.save_pretrained(output)
    tokenizer.save_pretrained(output)


# ------------------------------------------------------------------------------------------------------------- run


def keep_freed_memory() -> None:
    """Make malloc keep large freed blocks: page faults take a tenth of the time otherwise."""
    if hasattr(ctypes.CDLL(None), "mallopt"):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def share_gradients(model: LlamaForCausalLM) -> None:
    """Replace the gradients by their mean over all workers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient)).div_(WORKERS)
        start += gradient.numel()


def train(worker: int, output: Path, skills: bool, state: Path | None, checkpoint_seconds: float, meeting: str) -> None:
    """Run one worker through one part; worker 0 writes the files. If ``state`` exists, resume from it.

    Args:
        skills: train the second part, beginning from the files in ``output``.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=worker, world_size=WORKERS)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    part, first_step = (ALL_SKILLS, LANGUAGE.steps) if skills else (LANGUAGE, 0)
    if skills:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(output, dtype=torch.float32).state_dict())
        torch.distributed.barrier()  # worker 0 writes these files later
    optimizers = Optimizers(model)
    step, tokens, seconds = 0, 0, 0.0  # of this part; seconds of training, without evaluation
    if state is not None and state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        for optimizer, optimizer_state in zip(optimizers.parts, saved["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        step, tokens, seconds = saved["step"], saved["tokens"], saved["seconds"]
    log = Log(output / "training.log", keep=skills or step > 0, silent=worker > 0)
    if step == 0:
        parameters = sum(p.numel() for p in model.parameters())
        log(f"parameters {parameters:,}, vocabulary {len(tokenizer)}, seed {SEED}, {WORKERS} workers of one thread, "
            f"torch {torch.__version__}, steps from {first_step}")  # fmt: skip
    last_save, first = time.monotonic(), (tokens, seconds)
    sums, count = [0.0, 0.0], 0
    while step < part.steps:
        started = time.monotonic()
        ids, weights = make_batch(tokenizer.backend_tokenizer, first_step + step, worker)
        loss, on_answers = loss_of(model, ids, weights)
        loss.backward()
        share_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(learning_rate(part, step))
        step += 1
        tokens += ids.numel() * WORKERS
        seconds += time.monotonic() - started
        sums, count = [sums[0] + loss.item(), sums[1] + on_answers], count + 1
        if step % 25 == 0 or step == part.steps:
            speed = (tokens - first[0]) / (seconds - first[1])
            log(f"step {first_step + step} loss {sums[0] / count:.4f} answers {sums[1] / count:.4f} "
                f"tokens/s {speed:.0f} seconds {seconds:.0f}")  # fmt: skip
            first, sums, count = (tokens, seconds), [0.0, 0.0], 0
        if worker == 0 and step % 25 == 0 and time.monotonic() - last_save > checkpoint_seconds and step < part.steps:
            if state is not None:
                states = [optimizer.state_dict() for optimizer in optimizers.parts]
                counts = {"step": step, "tokens": tokens, "seconds": seconds}
                torch.save({"model": model.state_dict(), "optimizers": states, **counts}, state)
            with tempfile.TemporaryDirectory() as folder:
                save(model, tokenizer, Path(folder))
                evaluate(Path(folder), log)
            last_save = time.monotonic()
    if worker == 0:
        save(model, tokenizer, output)
        log(f"trained on {tokens:,} tokens in {part.steps} steps and {seconds:.0f} seconds")
        evaluate(output, log, thorough=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--skills-only", action="store_true", help="train only the second part, on the files in --output"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "pdserve" / "demo_model")
    parser.add_argument("--checkpoint-seconds", type=float, default=480.0)
    parser.add_argument("--state", type=Path, help="save the training state of a part to this file, and resume from it")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for skills in (True,) if arguments.skills_only else (False, True):
        with tempfile.TemporaryDirectory() as folder:
            state = arguments.state and arguments.state.with_name(
                f"{arguments.state.name}-{'skills' if skills else 'language'}"
            )
            shared = (arguments.output, skills, state, arguments.checkpoint_seconds, f"{folder}/meeting")
            mp.spawn(train, shared, nprocs=WORKERS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
