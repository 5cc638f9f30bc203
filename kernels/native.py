"""Native library of CPU kernels: C++ compiled for this processor at first use and cached on disk, or beforehand.

It contains the functions of cpu.py, elementwise.py, linear.py, lora.py, states.py and draw.py behind a plain C interface that
takes addresses, so that it needs no torch headers and does not depend on torch's version. It runs on the OpenMP runtime that
torch has loaded: a second one in the process would compete for the same cores.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from pdserve.kernels import prebuilt

log = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
COMPILERS = ("c++", "g++", "clang++")
MAX_COMPILERS = 4  # at once: each needs up to half a GB
# Without contraction: the compiler would fuse products and sums in one kernel and not in another that must give the same.
COMMON_FLAGS = ["-ffp-contract=off", "-std=c++17", "-fPIC", "-fopenmp"]
TEST_FLAGS = shlex.split(os.environ.get("PDSERVE_KERNEL_FLAGS", ""))  # for tests of other instruction sets
FLAGS = ["-O3", "-march=native", *COMMON_FLAGS, *TEST_FLAGS]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the index is the constant in the C++ sources

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionArguments(ctypes.Structure):
    """The arguments of pdserve_attend: `Problem` in problem.h, which explains them."""

    _fields_ = (
        *((name, _P) for name in ("out", "q", "cache", "tables", "starts", "kv_lens", "sinks")),
        *((name, _I) for name in ("out_token", "out_head", "q_token", "q_head", "block", "half", "head")),
        *((name, _I) for name in ("S", "H", "G", "D", "B", "M")),
        *((name, _F) for name in ("scale", "softcap")),
        *((name, _I) for name in ("window", "threads", "dtype", "use_amx", "byte_kv")),
    )


_ARGUMENT_TYPES = {
    "pdserve_attend": (ctypes.POINTER(AttentionArguments),),
    "pdserve_write_kv": (_P, _I, _I, _I, _P, _I, _I, _P, _I, _I, _P, *(_I,) * 7),
    "pdserve_copy_blocks": (_P, _I, _P, _P, _I, _P, _I, _I, _I),
    "pdserve_rms_norm": (_I, _P, _P, _P, _I, _I, _F, _I),
    "pdserve_rotary": (_I, _I, _P, _P, _I, _I, _I, _P, _P, _I, _I, _I, _P, _P, _I, _I, _I, _I),
    "pdserve_gate": (_I, _I, _P, _P, _I, _I),
    "pdserve_argmax": (_I, _P, _P, _I, _I, _I),
    "pdserve_draw": (_I, _P, _P, _I, _P, _P, _P, _P, _I, _I),
    "pdserve_linear": (_P, _P, _P, _P, _I, _I, _I, _I, _I, _P, _I),
    "pdserve_linear_low_bits": (*(_P,) * 5, _I, _I, _I, _P, *(_I,) * 6),
    "pdserve_pack": (_P, _P, _I, _I, _I, _I),
    "pdserve_packed": (_I, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "pdserve_low_bits": (_I, *(_P,) * 5, _I, _I, _I, _P, *(_I,) * 5),
    "pdserve_bytes": (_I, *(_P,) * 6, *(_I,) * 4),
    "pdserve_plain": (_I, _P, _P, _P, _P, _I, _I, _I, _I),
    "pdserve_add_low_rank": (_I, *(_P,) * 5, _I, _P, *(_I,) * 4),
    "pdserve_convolve": (_P, _P, _P, _P, _P, _I, _I),
    "pdserve_linear_attention": (_P, _P),
}

_thread = threading.local()  # functions: the _RecordingLibrary of this thread, while it records


class BuildError(Exception):
    """The library cannot be built or loaded; the message gives the reason."""


class _RecordingLibrary:
    """The library, with a `record` callback that receives each call as a repeatable function."""

    def __init__(self, record: Callable[[Callable[[], object]], object]) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(library(), name)

        def call(*arguments: Any) -> None:
            self._record(partial(function, *arguments))
            function(*arguments)

        return call


@contextmanager
def record_calls(record: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Within this context, pass each of this thread's kernel calls to `record`. They hold addresses, not tensors."""
    _thread.functions = _RecordingLibrary(record)
    try:
        yield
    finally:
        del _thread.functions


@contextmanager
def without_recording() -> Iterator[None]:
    """Within this context, record none of this thread's calls: those of an operator that is recorded as a whole."""
    before, _thread.functions = getattr(_thread, "functions", None), None
    try:
        yield
    finally:
        _thread.functions = before


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return the addresses of tensors, as arguments of the library's functions; None for none."""
    return [None if x is None else x.data_ptr() for x in tensors]


def functions() -> Any:
    """Return the library's functions; calls are recorded inside `record_calls`."""
    return getattr(_thread, "functions", None) or library()


@cache
def library() -> ctypes.CDLL:
    """Load the library: one of the folder PDSERVE_KERNELS, or one compiled now, unless an earlier process has done so.

    Raises:
        BuildError: no compiler, a compiler error, no OpenMP runtime of torch, or no writable cache directory.
    """
    openmp = _torch_openmp()  # first, so that the library finds it loaded
    path = _prebuilt() or _build(openmp)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(str(error)) from error
    for name, types in _ARGUMENT_TYPES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = list(types), None
    loaded.pdserve_instructions.restype = ctypes.c_char_p
    size = ctypes.sizeof(AttentionArguments)
    assert loaded.pdserve_attend_arguments() == size, "AttentionArguments and Problem in problem.h differ"
    if "amx_bf16" in cpu_features() and not loaded.pdserve_amx():
        log.warning("bfloat16 is slower: the processor has AMX, but the compiler or the system does not allow its use")
    return loaded


def instructions() -> str:
    """Return the instructions of the products in bfloat16: amx, avx512bf16, avx512, avx2 or vector4."""
    name: bytes = library().pdserve_instructions()
    return name.decode()


@cache
def is_available() -> bool:
    """Return whether the library can be loaded, building it if necessary. `select_kernel` reports why it cannot."""
    try:
        library()
    except BuildError:
        return False
    return True


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def cpu_features() -> str:
    """Return what -march=native depends on: the cache directory may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(fields)}))


def sources_hash() -> str:
    """Return the hash of the sources, of which a library must have been made."""
    key = hashlib.blake2b(digest_size=10)
    for path in (*SOURCES, *HEADERS):
        key.update(path.read_bytes() + b"\0")
    return key.hexdigest()


def _prebuilt() -> Path | None:
    """Return the library that was compiled beforehand for a processor like this, or None."""
    folder = os.environ.get(prebuilt.VARIABLE)
    if not folder or TEST_FLAGS:
        return None
    return prebuilt.find(Path(folder), sources_hash(), set(cpu_features().split()))


def _build(openmp: Path) -> Path:
    """Return the library's file, built if missing. Its name is a hash of everything it depends on, so it is never stale."""
    command = _compiler_or_error()
    key = hashlib.blake2b(digest_size=10)
    version = _run_compiler(command, "--version")
    for part in (sources_hash(), version, cpu_features(), " ".join(FLAGS), str(openmp)):
        key.update(part.encode() + b"\0")
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "kernels"
    except RuntimeError as error:
        raise BuildError("this user has no home directory; XDG_CACHE_HOME may name a folder for caches") from error
    target = folder / f"paged-{key.hexdigest()}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                if not target.exists() and (failure := _compile(target)):
                    raise BuildError(failure)
    except OSError as error:
        why = error.strerror or str(error)
        raise BuildError(f"{folder} cannot be written: {why}; XDG_CACHE_HOME may name a folder that can") from error
    return target


@cache
def _compile(target: Path) -> str:
    """Compile the library; return why that failed. A process tries once, since each try takes a minute or two."""
    log.info("compiling the kernels for this processor, once: a minute or two")
    try:
        compile_library(target, FLAGS)
    except BuildError as error:
        return str(error)
    return ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let other processes wait: all instances of a new deployment need the same library at once."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: each compiles
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_library(target: Path, flags: list[str]) -> None:
    """Compile the library into a file of an existing folder. Several processes may do so at the same time: the last one wins.

    Raises:
        BuildError: no compiler, a compiler error, or no OpenMP runtime of torch.
    """
    command, openmp = _compiler_or_error(), _torch_openmp()
    with tempfile.TemporaryDirectory(dir=target.parent) as build, _compilers(build) as group:
        library_file = Path(build) / "library.so"
        objects = [f"{build}/{source.stem}.o" for source in SOURCES]
        calls = [(command, *flags, "-c", str(one), "-o", made) for one, made in zip(SOURCES, objects, strict=True)]
        with ThreadPoolExecutor(MAX_COMPILERS) as threads:
            try:
                list(threads.map(lambda call: _run_compiler(*call, folder=build, group=group), calls))
            except BaseException:  # Ctrl-C, or one has failed
                os.killpg(group, signal.SIGKILL)
                raise
        # Linked without -fopenmp, which would add the compiler's own runtime.
        libraries = (str(openmp), "-Wl,-z,defs", "-lm")
        _run_compiler(command, "-shared", *objects, *libraries, "-o", str(library_file), folder=build, group=group)
        os.replace(library_file, target)


@contextmanager
def _compilers(folder: str) -> Iterator[int]:
    """Yield a process group for compilers. If this process ends before them, however it does, so do they, and the folder."""
    end = 'read _; trap "" TERM; kill 0; rm -rf "$0"; kill -KILL 0'
    with subprocess.Popen(["/bin/sh", "-c", end, folder], stdin=subprocess.PIPE, process_group=0) as watcher:
        try:
            yield watcher.pid
        finally:
            watcher.kill()


def _compiler_or_error() -> str:
    if command := compiler():
        return command
    reason = f"no C++ compiler on the path ({', '.join(COMPILERS)})"
    if folder := os.environ.get(prebuilt.VARIABLE):
        reason += f", and none of the libraries in {folder} is for this processor"
    raise BuildError(reason)


def _run_compiler(*command: str, folder: str | None = None, group: int | None = None) -> str:
    """Return what a compiler prints; its temporary files are in `folder`, and it is in a process group."""
    environment = os.environ | ({"TMPDIR": folder} if folder else {})
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, process_group=group
    )
    if completed.returncode != 0:
        errors = [line for line in completed.stderr.splitlines() if "error" in line or "undefined" in line]
        reason = (errors or [f"exit code {completed.returncode}"])[0].strip()
        raise BuildError(f"{Path(command[0]).name} failed: {reason}")
    return completed.stdout


def _torch_openmp() -> Path:
    """Return the file of the OpenMP runtime that torch has loaded into this process."""
    assert torch.get_num_threads() > 0
    maps = Path("/proc/self/maps")
    if not maps.exists():
        raise BuildError(f"the OpenMP runtime of torch can be found on Linux only, not on {platform.system()}")
    for line in maps.read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return Path(path)
    raise BuildError("torch has loaded no OpenMP runtime")
