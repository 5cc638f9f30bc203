"""Native library: build failures, the build cache, concurrent builds, the OpenMP runtime and AMX permission."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels import native, prebuilt, reference
from pdserve.kernels.attention import select_kernel
from tests.waiting import wait_until

CPU = torch.device("cpu")


def test_failing_compiler_is_reported(
    unbuilt_library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = unbuilt_library / "c++"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\necho "error: unknown target" >&2\necho >>$0.calls\nexit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(unbuilt_library))
    assert select_kernel("auto", CPU) is reference
    calls = (unbuilt_library / "c++.calls").read_text()
    assert select_kernel("auto", CPU) is reference
    assert (unbuilt_library / "c++.calls").read_text() == calls, "a process does not compile again"
    assert caplog.text.count("c++ failed: error: unknown target") == 2
    assert not [path for path in (unbuilt_library / "pdserve" / "kernels").iterdir()], "temporary files are removed"


def test_unwritable_cache_is_reported(
    unbuilt_library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (unbuilt_library / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(unbuilt_library / "file"))
    assert select_kernel("auto", CPU) is reference
    [record] = caplog.records
    reason = "/pdserve/kernels cannot be written: Not a directory; XDG_CACHE_HOME may name a folder that can"
    assert f"{unbuilt_library}/file{reason}" in record.getMessage()


@pytest.mark.until_recorded("kernels", "tests/kernels/test_native.py")
@pytest.mark.usefixtures("cpu_kernel")
def test_libraries_built_beforehand_need_no_compiler(tmp_path: Path, pdserve: Callable[..., Any]) -> None:
    """Of those that the processor can run, the first is taken; one of other sources is not."""
    features = set(native.cpu_features().split())
    fitting = [name for name, (_, needed) in prebuilt.TARGETS.items() if needed <= features]
    if not fitting:
        pytest.skip("libraries are built beforehand for x86-64 with AVX2")
    flags, _ = prebuilt.TARGETS[fitting[-1]]
    sources = native.sources_hash()
    native.compile_library(tmp_path / f"{fitting[-1]}-{sources}.so", [*flags, *native.COMMON_FLAGS])
    for name in fitting[:-1]:
        (tmp_path / f"{name}-{sources[::-1]}.so").touch()
    assert prebuilt.find(tmp_path, sources, features) == tmp_path / f"{fitting[-1]}-{sources}.so"
    assert prebuilt.find(tmp_path, sources, features - {"avx2"}) is None
    code = "from pdserve.kernels import native; print(native.library()._name, native.compiler())"
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), prebuilt.VARIABLE: str(tmp_path)}
    done = pdserve("-c", code, env=environment)
    assert done.stdout.split() == [str(tmp_path / f"{fitting[-1]}-{sources}.so"), "None"]
    for file in tmp_path.glob("*.so"):
        file.unlink()
    done = pdserve("-c", code, env=environment)
    assert f"and none of the libraries in {tmp_path} is for this processor" in done.stderr


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("amx", {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"}),
        ("avx512bf16", {"avx512_bf16", "avx512_vnni"}),
        ("avx512", set()),
        ("avx2", None),
    ],
)
def test_the_best_library_that_a_processor_runs(name: str, added: set[str] | None, tmp_path: Path) -> None:
    for target in prebuilt.TARGETS:
        (tmp_path / f"{target}-sources.so").touch()
    base = prebuilt.TARGETS["avx2" if added is None else "avx512"][1]
    found = prebuilt.find(tmp_path, "sources", {*base, *(added or ()), "unknown"})
    assert found == tmp_path / f"{name}-sources.so"


@pytest.mark.usefixtures("cpu_kernel")
def test_instances_that_start_at_once_compile_once(tmp_path: Path, fork_server: Any) -> None:
    built, calls, compiler = native.library()._name, tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(
        f"""#!/bin/sh
for last; do :; done
case "$*" in
  --version) echo 1 ;;
  *-shared*) sleep 1; cp {built} "$last" ;;
  *) echo >>{calls}; touch "$last" ;;
esac
"""
    )
    compiler.chmod(0o755)
    code = "import logging; logging.basicConfig(level=20); from pdserve.kernels import native; native.library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop(prebuilt.VARIABLE, None)
    with (tmp_path / "said").open("w") as output:
        builds = [fork_server.start(["-c", code], environment, *(output.fileno(),) * 2) for _ in range(2)]
        codes = [process.wait(600) for process in builds]
    said = (tmp_path / "said").read_text()
    assert codes == [0, 0], said
    assert len(calls.read_text().splitlines()) == len(native.SOURCES) and said.count("compiling the kernels") == 1


@pytest.mark.usefixtures("unbuilt_library")
def test_a_user_without_a_home_is_told_of_caches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as an arbitrary user id."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert select_kernel("auto", CPU) is reference
    assert "this user has no home directory; XDG_CACHE_HOME may name a folder for caches" in caplog.text


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_process_that_started_them(
    signum: signal.Signals, tmp_path: Path, fork_server: Any
) -> None:
    """So do the processes in which g++ compiles, and their files."""
    compiler, pids, cache = tmp_path / "c++", tmp_path / "pids", tmp_path / "pdserve" / "kernels"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 600 &\necho $! >>{pids}\nwait\n')
    compiler.chmod(0o755)
    code = "import os, signal; signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))\n"
    code += "from pdserve.kernels import native; native.library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop(prebuilt.VARIABLE, None)
    with open(os.devnull, "w") as nothing:
        build = fork_server.start(["-c", code], environment, *(nothing.fileno(),) * 2)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == native.MAX_COMPILERS)
    compilers = pids.read_text().split()
    build.send_signal(signum)
    build.wait(600)
    wait_until(lambda: not any(map(is_running, compilers)), seconds=60)
    wait_until(lambda: not list(cache.iterdir()), seconds=60)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_kernel")
def test_concurrent_builds(unbuilt_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = (*native.FLAGS, "-O0")  # unoptimised code compiles faster
    monkeypatch.setattr(native, "FLAGS", fast)
    code = f"from pdserve.kernels import native; native.FLAGS = {fast}; native.library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(unbuilt_library)}
    builds = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in builds] == [0, 0]
    assert len(list((unbuilt_library / "pdserve" / "kernels").iterdir())) == 1
    before = os.stat(next((unbuilt_library / "pdserve" / "kernels").iterdir()))
    native.library()
    after = os.stat(next((unbuilt_library / "pdserve" / "kernels").iterdir()))
    assert before.st_ino == after.st_ino, "the cached library was rebuilt"


@pytest.mark.usefixtures("cpu_kernel")
def test_process_has_one_openmp_runtime(pdserve: Callable[..., Any]) -> None:
    """In a process like an instance: other tests may have loaded another runtime."""
    code = (
        "from pdserve.kernels import native; native.library(); import pathlib\n"
        "lines = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "print(*{line.split('/')[-1] for line in lines if 'libgomp' in line or 'libiomp' in line or 'libomp' in line})"
    )
    assert len(pdserve("-c", code).stdout.split()) == 1


@pytest.mark.usefixtures("cpu_kernel")
@pytest.mark.skipif("amx_bf16" not in native.cpu_features(), reason="this processor has no AMX")
def test_amx_without_permission_falls_back(pdserve: Callable[..., Any]) -> None:
    """The system denies AMX to a process whose signal stack is too small for its registers."""
    code = """
import ctypes, logging
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0
logging.basicConfig(format="%(message)s")
import torch
from pdserve.kernels import cpu
from pdserve.kernels.batch import PagedBatch, Scores, layer_caches
pool = torch.ones((1, 1, 2, 1, 8, 32), dtype=torch.bfloat16)
one = torch.tensor([[0]])
batch = PagedBatch(layer_caches(pool), one[0], one, [5], [5], torch.tensor([5]), torch.tensor([0, 5]), cpu)
print(cpu.attend(torch.ones((5, 2, 32), dtype=torch.bfloat16), batch.caches[0], batch, Scores(1.0)).unique().tolist())
"""
    done = pdserve("-c", code)
    assert done.stdout == "[1.0]\n", done.stderr
    assert "does not allow its use" in done.stderr


def test_arguments_that_differ_from_the_compiled_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "AttentionArguments", ctypes.c_int64)
    with pytest.raises(AssertionError, match=r"AttentionArguments and Problem in problem\.h differ"):
        native.library.__wrapped__()
