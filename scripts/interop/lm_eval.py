"""lm-eval, the Language Model Evaluation Harness, on a prefill and a decode instance: its figures are those of transformers.

    .venv/bin/python scripts/interop/lm_eval.py [--environment FOLDER]

Installs lm-eval into an environment of its own, by default a temporary one, and runs two tasks that it writes, by
`local-completions`: log likelihoods of token ids in batches, and answers up to a stop string. See docs/interop.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve.cli.deployment import Deployment, free_port
from pdserve.config import UpConfig
from pdserve.lines.json_lines import json_lines
from pdserve.model_path import resolve_model

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Japan": "Tokyo",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Poland": "Warsaw",
}
TASKS: dict[str, dict[str, Any]] = {
    "capitals_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "capitals_answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{capital}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [{"name": "strip", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match"}],
    },
}
TOLERANCE = 1e-3  # of the sum of a continuation's log probabilities


def install(folder: Path) -> Path:
    """Return the environment's folder of commands, and print lm-eval's version for the report."""
    commands = folder / "bin"
    if not (commands / "lm_eval").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([commands / "pip", "install", "-q", "lm-eval[api]", "transformers"], check=True)
    shown = subprocess.run([commands / "pip", "show", "lm-eval"], check=True, capture_output=True, text=True).stdout
    print(shown.splitlines()[1].replace("Version:", "lm-eval"))
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path)
    given = parser.parse_args().environment
    with tempfile.TemporaryDirectory() as temporary:
        commands, folder = install(given or Path(temporary) / "environment"), Path(temporary)
        write_tasks(folder)
        config = UpConfig(port=free_port(), threads=1, kv_cache_memory="64MiB", dtype="float32")
        with Deployment(config, lambda line: None) as fleet:
            fleet.wait_ready()
            evaluate(commands, fleet.url, folder)
        compare(folder)


def write_tasks(folder: Path) -> None:
    """Write the questions, and each task as YAML, of which JSON is a part."""
    names = [*CAPITALS.values()]
    docs = [
        {
            "country": country,
            "capital": capital,
            "choices": names[:4] if i < 4 else names[i - 3 : i + 1],
            "label": min(i, 3),
        }
        for i, (country, capital) in enumerate(CAPITALS.items())
    ]
    (folder / "capitals.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "capitals.jsonl")}},
            "test_split": "test",
            "doc_to_text": "The capital of {{country}} is",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))


def evaluate(commands: Path, url: str, folder: Path) -> None:
    """Run lm-eval, which writes its results and each sample to files."""
    arguments = {
        "model": "demo",
        "base_url": f"{url}/v1/completions",
        "tokenizer": resolve_model("demo"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
    }
    flags = {
        "model": "local-completions",
        "model_args": ",".join(f"{name}={value}" for name, value in arguments.items()),
        "tasks": ",".join(TASKS),
        "include_path": folder,
        "output_path": folder / "results",
        "batch_size": 4,
    }
    command = [
        str(commands / "lm_eval"),
        *(str(part) for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONPATH": ""}
    subprocess.run([*command, "--log_samples"], check=True, env=os.environ | offline)


def compare(folder: Path) -> None:
    """Exit with an error unless each log likelihood and each answer is that of transformers."""
    path = resolve_model("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    [results] = (folder / "results").rglob("results_*.json")
    for name, found in json.loads(results.read_text())["results"].items():
        print(name, {metric: value for metric, value in found.items() if metric.startswith(("acc,", "exact_match,"))})
    differences = [0.0]
    for file in sorted((folder / "results").rglob("samples_*.jsonl")):
        for sample in (json.loads(line) for _, line in json_lines(file.read_text())):
            for arguments, [response] in zip(sample["arguments"].values(), sample["resps"], strict=True):
                context, continuation = arguments["arg_0"], arguments["arg_1"]
                if isinstance(continuation, str):
                    expected = log_likelihood(model, tokenizer, context, continuation)
                    differences.append(abs(float(response[0]) - expected[0]))
                    if differences[-1] > TOLERANCE or (response[1] == "True") != expected[1]:
                        sys.exit(f"{context!r} {continuation!r}: {response}, and by transformers {expected}")
                elif response != (answer := generate(model, tokenizer, context)):
                    sys.exit(f"{context!r}: {response!r}, and by transformers {answer!r}")
    print(f"{len(differences) - 1} log likelihoods within {max(differences):.1e} of transformers', all answers equal")


@torch.inference_mode()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log probability of a continuation, and whether greedy decoding would choose it."""
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = len(tokenizer(context).input_ids)
    logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(dim=-1)
    target = ids[0, start:]
    return float(logprobs.gather(1, target[:, None]).sum()), bool((logprobs.argmax(dim=-1) == target).all())


def generate(model: Any, tokenizer: Any, context: str) -> str:
    """Return the greedy answer before the stop string."""
    settings = TASKS["capitals_answer"]["generation_kwargs"]
    prompt = tokenizer(context, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=settings["max_gen_toks"])
    text: str = tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    return text.partition(settings["until"][0])[0]


if __name__ == "__main__":
    main()
