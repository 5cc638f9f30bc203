"""The parts of `scripts/gpu`: each runs in a process of its own and leaves a JSON file; with that file, it is not run again.

    scripts/gpu [PART…]                     run all parts, or these, as far as --minutes allow; again to continue
    scripts/gpu --wheels FOLDER             before, install the wheels in this folder, into one of its own
    scripts/gpu --download FOLDER           with network: put there what a machine with torch, triton and transformers lacks
    scripts/gpu --dry-run                   all parts with tiny shapes on the CPU: that they work, not what they measure
    scripts/gpu --list                      the parts, and what each answers

Parts run in order of importance; those that failed are run again after all others. A part that is stopped leaves its rows.
Exit codes: 0 all parts passed or were skipped by name; 1 one failed; 2 there is no GPU; 3 parts are left: run it again.
This file needs the standard library only.
"""

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SITE = Path(tempfile.gettempdir()) / "pdserve-gpu-site"  # where wheels are installed
MAX_WHEEL_BYTES = 64 << 20
KILL_AFTER_S = 10.0
STARTED = time.monotonic()
# What pdserve needs beside torch, triton, transformers and what these bring. A test compares both lists with pyproject.toml.
SERVING = (
    *("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic", "redis", "zmq", "msgspec"),
    *("google.protobuf", "prometheus_client", "xxhash", "httpx"),
)
WHEELS = (
    *(
        "fastapi",
        "fastapi-offline",
        "starlette",
        "uvicorn",
        "httptools",
        "uvloop",
        "redis",
        "pyzmq",
        "msgspec",
        "llguidance",
    ),
    *("httpx", "httpcore", "h11", "anyio", "certifi", "idna"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "opentelemetry-api"),
    *(
        "protobuf",
        "prometheus-client",
        "xxhash",
        "pytest",
        "pytest-timeout",
        "pluggy",
        "iniconfig",
        "nixl",
        "nixl-cu13",
    ),
)
UNUSED = "nixl_ep_"  # beginning of folders in wheels that nothing here uses: half of NIXL's
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)), "manylinux2014_x86_64")


@dataclass(frozen=True)
class Part:
    """A part of the session: `script` in benchmarks/, called with the part's name.

    Attributes:
        limit_s: after which it is stopped.
        needs: modules without which it is skipped.
    """

    name: str
    script: str
    limit_s: int
    answers: str
    needs: tuple[str, ...] = ()


# What the rest depends on comes first, then what most needs to be known.
PARTS = (
    Part(
        "smoke",
        "gpu_models.py",
        90,
        "steps are replayed, with eager tokens; tests of what only a GPU shows",
        ("pytest",),
    ),
    Part("rates", "gpu_kernels.py", 120, "copy and matrix rates, host transfers, the time of a launch, also replayed"),
    Part("identity", "gpu_models.py", 300, "greedy float32 equals transformers' generate, by model", ("pytest",)),
    Part("8b", "gpu_models.py", 400, "8B: decode at batch 1, 32, 256, prefill of 1k to 32k, as shares of the roofline"),
    Part("pd", "gpu_transfers.py", 520, "1P+1D on one GPU under bursts, beside colocated: TTFT, ITL p99", SERVING),
    Part("graphs", "gpu_models.py", 300, "steps replayed from graphs against eager ones: tokens and times"),
    Part("staging", "gpu_transfers.py", 200, "stores and loads while the model writes other blocks: no byte differs"),
    Part("handover", "gpu_transfers.py", 300, "blocks between two processes: shm staging, CUDA IPC, NIXL"),
    Part("attention", "gpu_kernels.py", 400, "attention against the reference: dtypes, head dims, windows, splits"),
    Part("memory", "gpu_transfers.py", 240, "two instances that start at once share the GPU's memory"),
    Part("swap", "gpu_transfers.py", 120, "blocks to host memory and back: bytes and rate"),
    Part("rows", "gpu_kernels.py", 420, "the tests of kernels; equal bits of rows with --batch-invariant", ("pytest",)),
    Part("sampler", "gpu_models.py", 100, "time of the sampler by settings; seeded tokens are the reference's"),
    Part("attention-rates", "gpu_kernels.py", 240, "attention by back end, flash against Triton, as rates"),
    Part("0.6b", "gpu_models.py", 300, "0.6B: decode at batch 1, 32, 256, prefill of 1k to 32k"),
    Part("8b-invariant", "gpu_models.py", 400, "the same for 8B with --batch-invariant on"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the JSON files; default: benchmarks/results"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no part may still run; default 9.5")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--download", type=Path, help="fill a folder of wheels, and do nothing else")
    parser.add_argument("--python-version", default="3.12", help="of the wheels to download")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--list", action="store_true", help="list the parts, and do nothing else")
    options = parser.parse_args()
    if unknown := {*options.parts} - {part.name for part in PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(p.name for p in PARTS)}")
    if options.list:
        print("\n".join(f"{part.name:16} {part.limit_s:4} s at most  {part.answers}" for part in PARTS))
        return 0
    if options.download:
        return download(options.download, options.python_version)
    if options.wheels and (code := install(options.wheels)):
        return code
    environment = child_environment(options.dry_run)
    device = describe_device(environment)
    if not options.dry_run and "gpu" not in device:
        print(f"scripts/gpu: {device.get('error', 'torch finds no GPU')}; nothing was run", file=sys.stderr)
        return 2
    print(json.dumps(device))
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    return run_all(chosen, options, environment, device)


def run_all(parts: list[Part], options: argparse.Namespace, environment: dict[str, str], device: dict[str, Any]) -> int:
    """Run what has not passed yet and fits into the time, what failed before at last, and return the exit code.

    A dry run saves starting processes.
    """
    end = STARTED + options.minutes * 60
    options.out.mkdir(parents=True, exist_ok=True)
    statuses = dict.fromkeys((part.name for part in parts), "left")
    todo, failed = list[Part](), list[Part]()
    for part in parts:
        path = options.out / f"gpu-{part.name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        if before.get("status") == "passed" and before.get("dry_run") == options.dry_run and not options.again:
            statuses[part.name] = "passed before"
        else:
            (failed if before.get("status") in ("failed", "stopped") else todo).append(part)
    todo += failed
    groups = [[part for part in todo if part.script == script] for script in {part.script: None for part in todo}]
    for group in groups if options.dry_run else [[part] for part in todo]:
        if sum(part.limit_s for part in group) > end - time.monotonic() and not options.dry_run:
            continue
        for name, outcome in run(group, environment).items():
            head = {"part": name, "dry_run": options.dry_run, "device": device}
            (options.out / f"gpu-{name}.json").write_text(json.dumps(head | outcome, indent=1) + "\n")
            statuses[name] = " ".join(filter(None, (outcome["status"], outcome.get("reason"))))
            print(f"== {name}: {statuses[name]} ({outcome['seconds']:.0f} s)", flush=True)
    print("\n" + "\n".join(f"{name:16} {status}" for name, status in statuses.items()))
    if any(status.startswith(("failed", "stopped")) for status in statuses.values()):
        return 1
    return 3 if "left" in statuses.values() else 0


def run(group: list[Part], environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Run parts of one script in one process, and return what came out of each."""
    outcomes: dict[str, dict[str, Any]] = {}
    for part in group:
        print(f"\n== {part.name}: {part.answers}", flush=True)
        if missing := [module for module in part.needs if not importable(module, environment)]:
            outcomes[part.name] = {"status": "skipped", "reason": f"without {', '.join(missing)}", "seconds": 0.0}
    wanted = [part for part in group if part.name not in outcomes]
    if not wanted:
        return outcomes
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as output:
        names = ",".join(part.name for part in wanted)
        command = [sys.executable, str(ROOT / "benchmarks" / wanted[0].script), names, folder]
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            child.wait(sum(part.limit_s for part in wanted))
            reason = f"exit code {child.returncode}, before it ended"
        except subprocess.TimeoutExpired:
            reason = "took too long"
        finally:
            stop(child)  # and what it may have left in its group
        lines = Path(folder, "log").read_text(errors="replace").splitlines()
        print("\n".join(lines[-60 * len(wanted) :]))
        for part in wanted:
            result = Path(folder, f"{part.name}.json")
            if result.exists():
                outcomes[part.name] = json.loads(result.read_text())
            else:
                seconds = round(time.monotonic() - started, 1)
                outcomes[part.name] = {"status": "stopped", "reason": reason, "seconds": seconds}
            if outcomes[part.name]["status"] in ("failed", "stopped"):
                outcomes[part.name]["log"] = lines[-80:]
    return outcomes


def stop(child: "subprocess.Popen[bytes]") -> None:
    """End the process group of a part, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue


def child_environment(dry_run: bool) -> dict[str, str]:
    """Return the variables of the parts: this checkout on the path, and the wheels, if any were installed."""
    paths = [str(ROOT)]
    if SITE.exists():
        paths.append(str(SITE))
    if not list(importlib.metadata.entry_points(group="pdserve.connectors")):
        paths.append(str(register()))
    paths += filter(None, [os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if dry_run:
        environment |= {"PDSERVE_GPU_DRY_RUN": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1"}
    return environment


def register() -> Path:
    """Write the entry points of this checkout, as pip would, and return their folder: connectors are found by them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.gettempdir()) / "pdserve-gpu-entry-points"
    metadata = folder / f"pdserve-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pdserve\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def importable(module: str, environment: dict[str, str]) -> bool:
    code = f"import importlib; importlib.import_module({module!r})"
    return (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False).returncode == 0
    )


def describe_device(environment: dict[str, str]) -> dict[str, Any]:
    """Return what torch says about the GPU, and the versions that matter, as the parts see them."""
    code = """
import importlib.metadata, json, platform, torch
versions = {}
for name in ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "nixl"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found = {"python": platform.python_version(), "versions": versions}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found |= {"gpu": p.name, "capability": [p.major, p.minor], "memory": p.total_memory, "gpus": torch.cuda.device_count(),
              "processors": p.multi_processor_count, "cuda": torch.version.cuda}
print(json.dumps(found))"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": f"torch cannot be used: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    described: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return described | {"commit": commit()}


def commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def download(folder: Path, python_version: str) -> int:
    """Download the wheels that a machine with torch, transformers and little else lacks; their versions are pinned here."""
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    command += ["--python-version", python_version, "--implementation", "cp", *platforms]
    code = subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *WHEELS], check=False).returncode
    for wheel in folder.glob("nixl_*.whl"):
        trim(wheel)
    size = sum(file.stat().st_size for file in folder.glob("*.whl")) if folder.exists() else 0
    print(f"{folder}: {size / 2**20:.1f} MiB of {MAX_WHEEL_BYTES >> 20}; add others, such as flash-attn-4, by hand")
    return code or int(size > MAX_WHEEL_BYTES)


def trim(wheel: Path) -> None:
    """Leave out of a wheel what nothing here uses."""
    trimmed = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            if not info.filename.startswith(UNUSED):
                target.writestr(info, source.read(info))
    trimmed.replace(wheel)


def install(folder: Path) -> int:
    """Install the wheels of a folder into a folder of their own, without network and without what they depend on."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels or sum(file.stat().st_size for file in wheels) > MAX_WHEEL_BYTES:
        print(f"scripts/gpu: {folder} must hold wheels, at most {MAX_WHEEL_BYTES >> 20} MiB of them", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    return subprocess.run([*command, "--target", str(SITE), *map(str, wheels)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
