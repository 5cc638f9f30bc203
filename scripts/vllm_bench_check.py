"""Check the router with an unmodified `vllm bench serve`.

With each of its back ends, no request may fail, every answer must have the requested number of tokens, and all figures must
be reported. Run it with the Python of an environment that has vLLM; the benchmark client needs neither a GPU nor the engine:
    benchmarks/peers/install FOLDER vllm
    pdserve up --model demo &
    FOLDER/vllm/bin/python scripts/vllm_bench_check.py http://127.0.0.1:8000 [TOKENIZER FOLDER]
"""

import contextlib
import io
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ENDPOINTS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}
REQUESTS, PROMPT, ANSWER = 12, 40, 9
PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl", "e2el")
GENEROUS = ("ttft:100000", "tpot:100000", "e2el:100000")  # milliseconds: every answered request counts as goodput


def main(url: str, tokenizer: str = "") -> None:
    try:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.benchmarks.serve import main as serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        sys.exit(
            f"vLLM cannot be imported here ({error}); benchmarks/peers/install FOLDER vllm, then FOLDER/vllm/bin/python"
        )
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for backend, endpoint in ENDPOINTS.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--base-url {url} --backend {backend} --endpoint {endpoint} --dataset-name random --ignore-eos "
            flags += f"--random-input-len {PROMPT} --random-output-len {ANSWER} --num-prompts {REQUESTS} "
            flags += "--max-concurrency 4 --request-rate 500 --num-warmups 1 --temperature 0.5 --top-k 40 "
            flags += f"--percentile-metrics {','.join(TIMES)} --metric-percentiles {','.join(map(str, PERCENTILES))} "
            flags += "--disable-tqdm --save-result --save-detailed --result-filename it.json"
            arguments = [*flags.split(), "--goodput", *GENEROUS, "--result-dir", folder]
            arguments += (
                ["--tokenizer", tokenizer] if tokenizer else []
            )  # otherwise the client takes it from /v1/models
            report = io.StringIO()
            with contextlib.redirect_stdout(report):
                serve(parser.parse_args(arguments))
            result = json.loads(Path(folder, "it.json").read_text())
        try:
            check(backend, result, report.getvalue())
        except AssertionError:
            print(report.getvalue(), result["errors"], sep="\n")
            raise
        print(f"{backend}: {result['completed']} requests, {result['total_output_tokens']} tokens, none failed")


def check(backend: str, result: dict[str, Any], report: str) -> None:
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["errors"] == [""] * REQUESTS
    assert result["output_lens"] == [ANSWER] * REQUESTS and result["total_output_tokens"] == REQUESTS * ANSWER
    assert all(length >= PROMPT for length in result["input_lens"]), "the chat template may add tokens"
    assert len(result["ttfts"]) == REQUESTS and all(0 < ttft < math.inf for ttft in result["ttfts"])
    if backend != "openai-responses":  # that API sends no event for a token without text
        extra = 1 if backend == "openai-chat" else 0  # the event with the role precedes the first token
        assert [len(itls) for itls in result["itls"]] == [ANSWER - 1 + extra] * REQUESTS
    assert all(result["generated_texts"])
    assert result["request_goodput"] == result["request_throughput"] > 0
    for time in TIMES:
        values = [result[f"p{percentile}_{time}_ms"] for percentile in PERCENTILES]
        assert 0 <= values[0] <= values[1] <= values[2] < math.inf and result[f"mean_{time}_ms"] > 0
    for line in ("Successful requests", "Failed requests", "Request goodput", "P99 ITL", "P99 E2EL"):
        assert line in report


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
