"""`pdserve doctor`: report what this machine can run, and which optional features lack a dependency."""

import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pdserve.cli.gpus import nvidia_smi
from pdserve.cores import num_cores
from pdserve.settings import is_installed

NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
DEMO_SHM_BYTES = 16 << 20  # with which the demo runs, as in a container of Docker's 64 MiB
FILE_WIDTH = 160  # columns of a report that is written to a file
GROUPS = {  # by capability of the default kernel
    "sinks": "attention sinks",
    "latent": "latent rows",
    "byte_kv": "8 bits",
    "states": "states of recurrent layers",
}


@dataclass(frozen=True)
class Finding:
    """One row of the report: whether a component is available, its details, and the features that use it."""

    component: str
    found: bool
    detail: str
    needed_for: str


def collect_findings() -> list[Finding]:
    """Inspect this machine without changing anything."""
    return [
        *(_python(), _torch(), _driver(), *_gpus(), _ranks(), *_kernels()),
        *(*_packages(), _compiler(), _shared_memory(), _redis()),
    ]


def verdict(findings: list[Finding]) -> str:
    """Return a sentence on whether `pdserve demo` will run here, and what would make it slow."""
    found = {finding.component for finding in findings if finding.found}
    if "/dev/shm" not in found:
        return "pdserve demo needs another --connector, such as file:///tmp/kv: /dev/shm is missing or full."
    if not any(one.startswith("cuda:") for one in found) and "attention: cpu" not in found:
        return "pdserve demo will run, slowly: install a C++ compiler (g++) for the fast attention kernel on CPUs."
    return "All is well for pdserve demo. What is marked – is optional."


def doctor() -> None:
    """Print the findings as a table, and a verdict."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "component", "found", "needed for"):
        table.add_column(column)
    findings = collect_findings()
    for finding in findings:
        mark = "[green]✓[/green]" if finding.found else "[yellow]–[/yellow]"
        table.add_row(mark, finding.component, finding.detail, finding.needed_for)
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    console.print(table)
    console.print(f"\n{verdict(findings)}", highlight=False)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _python() -> Finding:
    machine = f"Python {platform.python_version()}, {platform.machine()}, {num_cores()} cores"
    return Finding("machine", True, machine, "all")


def _torch() -> Finding:
    import torch

    return Finding("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads", "instances")


def _driver() -> Finding:
    """Return the version of NVIDIA's driver, of nvidia-smi or the kernel module; on WSL there is only the former."""
    text = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if not text and NVIDIA_MODULE.exists():
        text = NVIDIA_MODULE.read_text()
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return Finding("NVIDIA driver", found is not None, found[0] if found else "none", "--device cuda")


def _gpus() -> list[Finding]:
    """Return a row for each GPU that torch finds, or one that says why there is none."""
    import torch

    cuda = f"CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        reason = (
            f"this torch is for {cuda} and finds none" if torch.version.cuda else "this torch is built without CUDA"
        )
        return [Finding("GPU", False, reason, "--device cuda; everything runs on the CPU too, slower")]
    rows = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        detail = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {cuda}"
        )
        rows.append(Finding(f"cuda:{number}", True, detail, f"--device cuda:{number}"))
    return rows


def _kernels() -> list[Finding]:
    """Return what each attention kernel would do on the device that `--device auto` takes, and why."""
    import torch

    from pdserve.kernels.attention import capabilities, default_kernel, explain_kernels

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    default, reasons = default_kernel(device), explain_kernels(device)
    findings = [
        Finding(
            f"attention: {name}",
            not reason,
            reason or f"prefill and decode on {device}{', the default' if name == default else ''}",
            f"--kernel {name}",
        )
        for name, reason in reasons.items()
    ]
    able = capabilities("reference" if reasons[default] else default, device)
    groups = [text for name, text in GROUPS.items() if getattr(able, name)]
    findings.append(Finding("KV groups", True, ", ".join(["layers with windows", *groups]), "models that have them"))
    return [*findings, *([_flash(device)] if device.type == "cuda" and not reasons["triton"] else [])]


def _flash(device: Any) -> Finding:
    """Return which back ends the kernel flash would choose by phase, and why not others: for 16 bits and heads of 128."""
    import torch

    from pdserve.kernels.batch import KVFormat
    from pdserve.kernels.gpu import flash

    chosen = flash.choose(flash.installed(), flash.capability(device), KVFormat(torch.bfloat16, frozenset({128}), 16))
    default = "" if chosen.prefill == chosen.decode == flash.TRITON else ", the default in 16 bits"
    detail = f"prefill by {chosen.prefill}, decode by {chosen.decode}{default}"
    return Finding("attention: flash", bool(default), "; ".join((detail, *chosen.reasons)), "--kernel flash")


def _ranks() -> Finding:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    gpus = torch.cuda.device_count()
    detail = (
        f"{', '.join(backends) or 'torch has no backend'}; {gpus} GPUs, on CPUs any number of ranks; no step graphs"
    )
    return Finding("torch.distributed", bool(backends), detail, "--tensor-parallel-size")


def _packages() -> list[Finding]:
    optional = {
        "flash_attn": ("flash-attn", "--kernel flash, on GPUs"),
        "triton": ("triton", "--kernel triton"),
        "nixl": ("nixl", "nixl://"),
        "redis": ("redis", "redis://, --registry and --response-store (this is the client; a server is below)"),
        "grpc": ("grpcio", "--grpc-port and --grpc-health-port"),
        "grpc_health": ("grpcio-health-checking", "the same"),
        "grpc_reflection": ("grpcio-reflection", "the same"),
        "zmq": ("pyzmq", "--kv-events-config and --kv-events-subscribe"),
        "python_multipart": ("python-multipart", "--batch-folder"),
        "fastapi_offline": ("fastapi-offline", "/docs: Swagger UI"),
        "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake://, with the system's libibverbs1"),
        "lz4": ("lz4", "?codec=lz4 and ?codec=auto of connectors"),
        "zstandard": ("zstandard", "?codec=zstd and ?codec=auto"),
        "ml_dtypes": ("ml_dtypes", "?codec=fp8 and ?codec=int8"),
        "opentelemetry.sdk": ("opentelemetry-sdk", "--otlp-endpoint"),
        "smg_grpc_proto": ("smg-grpc-proto", "vLLM's VllmEngine on --grpc-port"),
        "ray": ("ray", "pdserve up --on ray"),
        "kubernetes": ("kubernetes", "--launcher kubernetes:// of pdserve autoscale"),
        "accelerate": ("accelerate", "checkpoints with FP8 weights"),
        "gguf": ("gguf", "pdserve convert-gguf"),
        "matplotlib": ("matplotlib", "pdserve connector bench --plot"),
    }
    rows = []
    for module, (package, use) in optional.items():
        found = is_installed(module)
        rows.append(Finding(package, found, _version(package) or ("installed" if found else "not installed"), use))
    return rows


def _compiler() -> Finding:
    path = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return Finding(
        "C++ compiler", path is not None, path or "none on the PATH", "--kernel cpu: the fast attention kernel on CPUs"
    )


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", False, "missing", "shm://; use file:// or redis:// instead")
    free = shutil.disk_usage("/dev/shm").free
    detail = f"{free / 2**30:.1f} GiB free" if free >= 1 << 30 else f"{free >> 20} MiB free"
    return Finding("/dev/shm", free >= DEMO_SHM_BYTES, detail, "shm:// between instances on one host")


def _redis() -> Finding:
    path = shutil.which("redis-server") or shutil.which("valkey-server")
    return Finding("redis-server", path is not None, path or "none on the PATH", "a local server for redis://")
