"""Linear layers whose rows do not depend on the batch, compared with cuBLAS on a GPU: `python benchmarks/matmul.py`.

The products are those of a layer of Qwen3-8B, for a decode step of one and of 32 sequences, and for a chunk of a prefill.
Calls alternate; the best of each counts. The weights of a round exceed the second-level cache.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import checkpoints
import report
import torch

from pdserve.cli.flags import command_from_config
from pdserve.config import flag
from pdserve.errors import SetupError

LAYERS = 8  # copies of each weight, used in turn
WEIGHTS = {"q": (4096, 4096), "k": (1024, 4096), "gate": (12288, 4096), "down": (4096, 12288)}  # [N, K]


@dataclass(frozen=True, kw_only=True)
class Settings(report.Settings):
    dtype: str = flag("bfloat16 or float16", "bfloat16")
    seconds: float = flag("for each row", 1.0)


def benchmark(settings: Settings) -> None:
    """Measure products of our kernel beside those of torch."""
    if not torch.cuda.is_available():
        raise SetupError("this benchmark needs a GPU")
    from pdserve.kernels.gpu.matmul import linear

    dtype, rows = checkpoints.torch_dtype(settings.dtype), []
    for name, (outputs, features) in WEIGHTS.items():
        weights = [torch.randn(outputs, features, device="cuda", dtype=dtype) for _ in range(LAYERS)]
        for count in (1, 32, 2048):
            x_RK = torch.randn(count, features, device="cuda", dtype=dtype)
            ours, cublas = _best(settings.seconds, x_RK, weights, [linear, torch.nn.functional.linear])
            row = {"weight": name, "rows": count, "us": ours * 1e6, "cublas_us": cublas * 1e6, "ratio": cublas / ours}
            rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    report.show(rows)
    print(report.write("matmul", settings, {"rows": rows}))


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.inference_mode()
def _best(seconds: float, x_RK: torch.Tensor, weights: list[torch.Tensor], products: list[Product]) -> list[float]:
    best = [float("inf")] * len(products)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or float("inf") in best:
        for i, product in enumerate(products):
            for weight_NK in weights:
                torch.cuda.synchronize()
                started = time.perf_counter()
                product(x_RK, weight_NK)
                torch.cuda.synchronize()
                best[i] = min(best[i], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    report.main(command_from_config(Settings, benchmark))
