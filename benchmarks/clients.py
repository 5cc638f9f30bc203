"""`pdserve bench serve` beside other load generators: `python benchmarks/clients.py [--vllm …] [--guidellm …]`.

Each client sends as many requests of the same lengths at Poisson times to one server, in turns. The others are
`plain_client.py`, which shares no code with pdserve, and, from environments of their own, `vllm bench serve` and GuideLLM.
The server is a paced deployment (see `forecast.py`), or the one at `--url`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forecast
import report

import pdserve
from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError
from pdserve.tools.simulator.fleet import Fleet

PLAIN = Path(__file__).parent / "plain_client.py"
MODEL = Path(pdserve.__file__).parent / "demo_model"
START_VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FIGURES = [f"p{p}_{name}_ms" for name in ("ttft", "itl", "tpot") for p in (50, 99)] + ["output_throughput"]


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    url: str = flag("of a server; empty: a paced deployment of this script", "")
    model: str = flag("its name at the server", "demo")
    tokenizer: str = flag("folder with its tokenizer; empty: the demo model's", "")
    vllm: str = flag("Python of an environment with vLLM; empty: not", "")
    guidellm: str = flag("`guidellm` of an environment; empty: not", "")
    requests: int = flag("per client and round", 120, least=2)
    rate: float = flag("requests per second", 4.0, above=0)
    input_tokens: int = flag("of a prompt", 200, least=1)
    output_tokens: int = flag("of an answer", 40, least=2)
    repeat: int = flag("rounds, in turns", 3, least=1)


def ours(settings: Settings, url: str, seed: int, folder: Path) -> dict[str, Any]:
    """Measure with `pdserve bench serve`."""
    flags = [*_vllm_flags(settings, url, seed, folder)]
    _run([sys.executable, "-m", "pdserve", "bench", "serve", *flags])
    return dict(json.loads((folder / "it.json").read_text()))


def plain(settings: Settings, url: str, seed: int, folder: Path) -> dict[str, Any]:
    """Measure with the independent client."""
    load = (settings.requests, settings.rate, settings.input_tokens, settings.output_tokens, seed)
    tokenizer = Path(settings.tokenizer or MODEL, "tokenizer.json")
    output = _run([sys.executable, str(PLAIN), url, settings.model, str(tokenizer), *map(str, load)])
    return dict(json.loads(output.splitlines()[-1]))


def vllm(settings: Settings, url: str, seed: int, folder: Path) -> dict[str, Any]:
    """Measure with `vllm bench serve`."""
    flags = [*_vllm_flags(settings, url, seed, folder), "--disable-tqdm"]
    flags += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
    _run([settings.vllm, "-c", START_VLLM, *flags])
    return dict(json.loads((folder / "it.json").read_text()))


def guidellm(settings: Settings, url: str, seed: int, folder: Path) -> dict[str, Any]:
    """Measure with GuideLLM. Its inter-token latency is a request's mean, which is TPOT in the terms of the others."""
    data = f"kind=synthetic_text,prompt_tokens={settings.input_tokens},output_tokens={settings.output_tokens}"
    command = [settings.guidellm, "run", "--backend", f"kind=openai_http,target={url},model={settings.model}"]
    command += [
        "--profile",
        f"kind=poisson,rate={settings.rate}",
        "--data",
        data,
        "--seed",
        f"kind=static,value={seed}",
    ]
    command += ["--constraint", f"kind=max_requests,count={settings.requests}", "--disable-console"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={settings.tokenizer or MODEL}"]
    command += ["--output", f"kind=json,path={folder / 'guidellm.json'}"]
    _run(command)
    (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    figures = dict[str, Any]()
    for name, key in (("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms")):
        percentiles = metrics[key]["successful"]["percentiles"]
        figures |= {f"p{p}_{name}_ms": percentiles[f"p{p}"] for p in (50, 99)}
    return figures | {"output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"]}


def _vllm_flags(settings: Settings, url: str, seed: int, folder: Path) -> Iterator[str]:
    """Yield the flags that `vllm bench serve` and `pdserve bench serve` have in common."""
    yield from ("--base-url", url, "--model", settings.model, "--tokenizer", settings.tokenizer or str(MODEL))
    yield from ("--dataset-name", "random", "--num-prompts", str(settings.requests), "--seed", str(seed))
    yield from ("--random-input-len", str(settings.input_tokens), "--random-output-len", str(settings.output_tokens))
    yield from ("--request-rate", str(settings.rate), "--ignore-eos", "--temperature", "0", "--save-result")
    yield from ("--result-dir", str(folder), "--result-filename", "it.json")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()[-2000:]
        raise SetupError(f"{command[0]} ended with exit code {done.returncode}: {reason}")
    return done.stdout


@contextmanager
def server(settings: Settings, folder: Path) -> Iterator[str]:
    """Yield the URL of the server."""
    if settings.url:
        yield settings.url
        return
    forecast.PROFILE.save(folder / "profile.json")
    with forecast.deployed(Fleet(prefill=1, decode=1), str(folder / "profile.json")) as deployment:
        yield deployment.url


def run(settings: Settings) -> None:
    """Measure one server with each client."""
    settings = settings.sized({"requests": 6, "rate": 20.0, "input_tokens": 30, "output_tokens": 5, "repeat": 1})
    clients: dict[str, Callable[[Settings, str, int, Path], dict[str, Any]]] = {"pdserve": ours, "plain": plain}
    clients |= {"vllm": vllm} if settings.vllm else {}
    clients |= {"guidellm": guidellm} if settings.guidellm else {}
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name, server(settings, Path(name)) as url:
        for seed in range(settings.repeat):
            for number, (client, measure) in enumerate(clients.items()):
                figures = measure(settings, url, 10 * seed + number, Path(name))  # prompts that are in no cache yet
                rows.append(
                    {"client": client, "round": seed} | {key: figures[key] for key in FIGURES if key in figures}
                )
                print(json.dumps(rows[-1]), flush=True)
    report.show(medians(rows, list(clients)))
    vllm_name, guidellm_name = Path(settings.vllm).name, Path(settings.guidellm).name  # results name no folders
    settings = replace(settings, tokenizer="", vllm=vllm_name, guidellm=guidellm_name)
    print(report.write("clients", settings, {"rows": rows}))


def medians(rows: list[dict[str, Any]], clients: list[str]) -> list[dict[str, str]]:
    """Return a row for each client: of each figure the median, and the lowest and highest."""
    shown = []
    for client in clients:
        cells = {"median (lowest to highest)": client}
        for key in FIGURES:
            values = [row[key] for row in rows if row["client"] == client and key in row]
            low_high = f" ({min(values):.4g} to {max(values):.4g})" if values else ""
            cells[key] = f"{statistics.median(values):.4g}{low_high}" if values else ""
        shown.append(cells)
    return shown


if __name__ == "__main__":
    report.main(command_from_config(Settings, run))
