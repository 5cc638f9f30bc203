"""Loss of a text by format of weights and KV: `python benchmarks/loss.py --text FILE`.

The text is one that the model has not been trained on, such as a validation set: it is cut into rows of as many tokens, and
the loss is the mean of -log p over all tokens but the first of each row, as `prompt_logprobs` reports it. Rows are computed
as any prompt is, so a row attends to its own rounded KV.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report

from pdserve import LLM, SamplingParams
from pdserve.cli.flags import command_from_config
from pdserve.config import flag

FORMATS: dict[str, dict[str, str]] = {
    "dense": {},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 weights, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    model: str = flag("directory, hub id or demo", "demo")
    text: str = flag("file; default: the guide to pdserve's connectors", "")
    tokens: int = flag("of the text", 65536)
    row: int = flag("tokens of a row", 1024)


QUICK = {"tokens": 256, "row": 128}


def benchmark(settings: Settings) -> None:
    """Compare the loss of each format with that of the dense model in bfloat16."""
    settings = settings.sized(QUICK)
    text = Path(settings.text or Path(__file__).parents[1] / "docs/connectors.md").read_text()
    losses = {name: _loss(settings, text, formats) for name, formats in FORMATS.items()}
    rows = [
        {"format": name, "loss": round(loss, 5), "more_percent": round((loss / losses["dense"] - 1) * 100, 3)}
        for name, loss in losses.items()
    ]
    report.show(rows)
    named = replace(settings, text=Path(settings.text).name)
    print(report.write("loss", named, {"rows": rows}))


def _loss(settings: Settings, text: str, formats: dict[str, Any]) -> float:
    with LLM(settings.model, dtype="bfloat16", **formats) as llm:
        ids = llm.get_tokenizer()(text, add_special_tokens=False, verbose=False).input_ids[: settings.tokens]
        prompts = [{"prompt_token_ids": ids[at : at + settings.row]} for at in range(0, len(ids), settings.row)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    losses = list[float]()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(prompt["prompt_token_ids"], output.prompt_logprobs, strict=True)
        losses += [-entry[token].logprob for token, entry in pairs if entry]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
