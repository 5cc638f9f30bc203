"""Paged attention on CPUs: C++, compiled for this very processor at first use and kept in the user's cache.

The library, which has the functions of elementwise.py, linear.py and draw.py in it as well, is plain C called with addresses,
so that it needs no headers of torch and outlives torch's versions. It runs on the OpenMP runtime that torch has loaded
already: a second one in the process would fight for the same cores.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from pdserve.kernels.batch import PagedBatch

log = logging.getLogger(__name__)

NAME = "cpu"
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
HUGE_PAGE = 1 << 21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <linux/mman.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's <malloc.h>
KEPT, KEPT_BY_OLD = 1 << 30, 32 << 20  # bytes; old versions of glibc refuse more for single pieces
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by the numbers that the sources give them

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ATTEND = (_I, _P, _I, _I, _P, _I, _I, _P, _I, _I, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F, _I, _F, _I, _I, _I)
_WRITE_KV = (_P, _I, _I, _I, _P, _I, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I)
_RMS_NORM = (_I, _P, _P, _P, _I, _I, _F, _I)
_ROTARY = (_I, _I, _P, _P, _I, _I, _I, _P, _P, _I, _I, _I, _P, _P, _I, _I, _I, _I)
_GATE = (_I, _I, _P, _P, _I, _I)
_ARGMAX = (_I, _P, _P, _I, _I, _I)
_DRAW = (_I, _P, _P, _I, _P, _P, _P, _P, _I, _I)
_LINEAR = (_P, _P, _P, _P, _I, _I, _I, _I, _P, _I)
_COPY_BLOCKS = (_P, _I, _P, _P, _I, _P, _I, _I, _I)


class CannotBuild(Exception):
    """There will be no library; the text says why."""


def write_kv(cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Puts the K and V of each new token into its slot of one layer's cache."""
    assert cache_N2GBD.dtype == k_TGD.dtype == v_TGD.dtype
    k_TGD, v_TGD = _rows(k_TGD), _rows(v_TGD)
    tokens, heads, size = k_TGD.shape
    item = cache_N2GBD.itemsize
    functions().pdserve_write_kv(
        cache_N2GBD.data_ptr(),
        *(item * stride for stride in _strides(cache_N2GBD)),
        k_TGD.data_ptr(),
        item * k_TGD.stride(0),
        item * k_TGD.stride(1),
        v_TGD.data_ptr(),
        item * v_TGD.stride(0),
        item * v_TGD.stride(1),
        slots_T.contiguous().data_ptr(),
        tokens,
        heads,
        cache_N2GBD.shape[3],
        item * size,
        torch.get_num_threads(),
    )


def attend(
    q_THD: torch.Tensor,
    cache_N2GBD: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    longest_run: int = 0,
    amx: bool = True,
) -> torch.Tensor:
    """Attention of every new token over its own sequence, [T, H, D].

    `longest_run` is how much KV one thread reads before a decoding sequence is split; 0 leaves it to the kernel. `amx` lets
    matrix instructions compute prefill in bfloat16, where there are any.
    """
    assert q_THD.dtype == cache_N2GBD.dtype
    q_THD = _rows(q_THD)
    _, heads, size = q_THD.shape
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    tables_SM, starts = batch.tables_SM.contiguous(), batch.starts
    functions().pdserve_attend(
        DTYPES.index(q_THD.dtype),
        out_THD.data_ptr(),
        out_THD.stride(0),
        out_THD.stride(1),
        q_THD.data_ptr(),
        q_THD.stride(0),
        q_THD.stride(1),
        cache_N2GBD.data_ptr(),
        *_strides(cache_N2GBD),
        tables_SM.data_ptr(),
        starts.data_ptr(),
        batch.kv_lens_S.data_ptr(),
        len(batch.query_lens),
        heads,
        cache_N2GBD.shape[2],
        size,
        cache_N2GBD.shape[3],
        tables_SM.shape[1],
        scale,
        window or 0,
        softcap or 0.0,
        longest_run,
        amx,
        torch.get_num_threads(),
    )
    return out_THD


def copy_blocks(pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
    """Whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""
    _copy(pool_N, targets_C, pool_N, sources_C, len(sources_C))


def gather_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
    """out[i] = pool[blocks[i]], whole blocks."""
    _copy(out_C, None, pool_N, blocks_C, len(blocks_C))


def scatter_blocks(pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
    """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""
    _copy(pool_N, blocks_C, values_C, None, len(blocks_C))


def huge_pages(x: torch.Tensor, *, written: bool = False) -> None:
    """Asks the system to keep a large tensor in pages of 2 MiB, where it can: reading gets a quarter faster, as blocks and
    weights are too far apart for the processor's table of small pages. Free before the first write; `written` memory is
    moved, at some 3 GB/s."""
    if x.device.type == "cpu":
        huge_pages_at(x.data_ptr(), x.nbytes, written=written)


def huge_pages_at(address: int, nbytes: int, *, written: bool = False) -> None:
    """The same for any memory. What is `written` takes what lies beside it along, in the pages that it begins and ends in."""
    first, end = address // HUGE_PAGE * HUGE_PAGE, -(-(address + nbytes) // HUGE_PAGE) * HUGE_PAGE
    if not written:
        first, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if sys.platform != "linux" or nbytes < HUGE_PAGE or first >= end:
        return
    for advice in (MADV_HUGEPAGE, MADV_COLLAPSE) if written else (MADV_HUGEPAGE,):
        _madvise()(first, end - first, advice)  # best effort: kernels without them answer with an error


def keep_freed_memory() -> int:
    """Lets malloc keep what is freed, up to a GiB, for the next step, which needs as much: memory that has been given back is
    cleared and mapped page by page when it is asked for again, which takes a tenth to a fifth of a prefill. For the whole
    process, from now on, and where its malloc is glibc's.

    Returns:
        Bytes of the largest piece that it keeps; 0 where there is nothing to tell.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None or not mallopt(M_TRIM_THRESHOLD, KEPT):
        return 0
    return next((most for most in (KEPT, KEPT_BY_OLD) if mallopt(M_MMAP_THRESHOLD, most)), 0)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _copy(
    to: torch.Tensor, targets: torch.Tensor | None, source: torch.Tensor, sources: torch.Tensor | None, count: int
) -> None:
    assert to.dtype == source.dtype and to.shape[1:] == source.shape[1:]
    assert to[:0].is_contiguous() and source[:0].is_contiguous() and to[0].is_contiguous() and source[0].is_contiguous()
    targets, sources = (None if ids is None else ids.contiguous() for ids in (targets, sources))
    functions().pdserve_copy_blocks(
        to.data_ptr(),
        to.itemsize * to.stride(0),
        None if targets is None else targets.data_ptr(),
        source.data_ptr(),
        source.itemsize * source.stride(0),
        None if sources is None else sources.data_ptr(),
        count,
        to[0].nbytes,
        torch.get_num_threads(),
    )


def _rows(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def _strides(cache_N2GBD: torch.Tensor) -> tuple[int, int, int]:
    """Of blocks, of K and V, of heads; the tokens of a block follow each other."""
    block, half, head, token, element = cache_N2GBD.stride()
    assert (token, element) == (cache_N2GBD.shape[4], 1)
    return block, half, head


class _Noting:
    """The library, with every call made known as something that can be called again."""

    def __init__(self, note: Callable[[Callable[[], object]], object]) -> None:
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(library(), name)

        def call(*arguments: Any) -> None:
            self._note(partial(function, *arguments))
            function(*arguments)

        return call


_thread = threading.local()


@contextmanager
def noted(note: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """This thread's calls of kernels are made known, with addresses instead of tensors, while this lasts."""
    _thread.functions = _Noting(note)
    try:
        yield
    finally:
        del _thread.functions


def functions() -> Any:
    """The kernels by their names in the sources."""
    return getattr(_thread, "functions", None) or library()


@cache
def library() -> ctypes.CDLL:
    """The loaded library, compiled if no earlier process has done so.

    Raises:
        CannotBuild: no compiler, an error from it, no OpenMP runtime of torch, nowhere to write.
    """
    try:
        loaded = ctypes.CDLL(str(_built(_openmp_of_torch())))
    except OSError as error:
        raise CannotBuild(str(error)) from error
    for function, arguments in (
        (loaded.pdserve_attend, _ATTEND),
        (loaded.pdserve_write_kv, _WRITE_KV),
        (loaded.pdserve_copy_blocks, _COPY_BLOCKS),
        (loaded.pdserve_rms_norm, _RMS_NORM),
        (loaded.pdserve_rotary, _ROTARY),
        (loaded.pdserve_gate, _GATE),
        (loaded.pdserve_argmax, _ARGMAX),
        (loaded.pdserve_draw, _DRAW),
        (loaded.pdserve_linear, _LINEAR),
    ):
        function.argtypes, function.restype = list(arguments), None
    if "amx_bf16" in _cpu() and not loaded.pdserve_amx():
        log.warning("bfloat16 is slower: compiler or system do not let it use AMX, the matrix instructions")
    return loaded


@cache
def can_build() -> bool:
    """There is a library, or there will be one when it is asked for. The kernel's choice tells why there is none."""
    try:
        library()
    except CannotBuild:
        return False
    return True


def compiler() -> str | None:
    """The C++ compiler on the path."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _built(openmp: Path) -> Path:
    """The library's file. Its name tells everything that it was made from, so that it is never out of date."""
    command = compiler()
    if command is None:
        raise CannotBuild(f"no C++ compiler on the path ({', '.join(COMPILERS)})")
    key = hashlib.blake2b(digest_size=10)
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    for part in (*texts, _output(command, "--version"), _cpu(), " ".join(FLAGS), str(openmp)):
        key.update(part.encode() + b"\0")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "kernels"
    target = folder / f"paged-{key.hexdigest()}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as build:  # instances start together: each builds, the last stays
            made = Path(build) / "made.so"
            objects = [f"{build}/{source.stem}.o" for source in SOURCES]
            for source, compiled in zip(SOURCES, objects, strict=True):
                _output(command, *FLAGS, "-c", str(source), "-o", compiled)
            # Linked without -fopenmp, which would name the compiler's own runtime.
            _output(command, "-shared", *objects, str(openmp), "-Wl,-z,defs", "-lm", "-o", str(made))
            os.replace(made, target)
    return target


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        raise CannotBuild(f"{Path(command[0]).name} failed: {(lines or [f'exit code {done.returncode}'])[0].strip()}")
    return done.stdout


def _cpu() -> str:
    """What -march=native looks at: a home directory may be shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp_of_torch() -> Path:
    """The OpenMP runtime that this process runs on; importing torch has loaded it."""
    assert torch.get_num_threads() > 0
    maps = Path("/proc/self/maps")
    if not maps.exists():
        raise CannotBuild(
            f"only on Linux is it known which OpenMP runtime torch has loaded, not on {platform.system()}"
        )
    for line in maps.read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return Path(path)
    raise CannotBuild("torch has loaded no OpenMP runtime")
