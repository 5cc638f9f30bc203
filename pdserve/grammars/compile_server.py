"""The compile server: loads xgrammar and a tokenizer once, and then forks a process with limits for each grammar.

It also forks mask workers (`mask_worker.py`).

    python -m pdserve.grammars.compile_server SOCKET MODEL VOCAB_SIZE EOS_TOKEN_IDS LIMITS

SOCKET is the descriptor of a Unix stream socket; the last two arguments are JSON. The server first sends READY. Then it
receives descriptors of sockets, each with one byte: MASKS for a mask worker's connection, or COMPILE. From the latter, the
forked process reads the specification of a grammar up to its end, and it writes STARTED, and then OK or ERROR, a length in 4
bytes, and the compiled grammar as JSON or xgrammar's message. A process that exceeds a limit is killed and writes nothing
more. What it had allocated goes with it, so a grammar cannot leave anything behind.

The server has one thread, so forking is safe. It ends when the other end of its socket is closed.
"""

import contextlib
import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from typing import Any

import numpy as np
import torch

from pdserve.grammars.limits import MAX_MASK_CPU_S, CompileLimits, mask_budget_s
from pdserve.grammars.mask_worker import serve_masks
from pdserve.grammars.specification import build_grammar
from pdserve.model_path import resolve_model

READY, COMPILE, MASKS = b"r", b"c", b"m"
STARTED, OK, ERROR = b".", b"+", b"-"
LENGTH_BYTES = 4
NICENESS = 10  # of compiling: running requests come first
MAX_MESSAGE_CHARS = 1000
TRIAL_TOKENS = 64


def main(arguments: list[str]) -> None:
    """Serve until the client closes its end."""
    descriptor, model, vocab_size, eos_token_ids, limits = arguments
    control = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended processes are reaped by the kernel
    info = _tokenizer_info(model, int(vocab_size), json.loads(eos_token_ids))
    gc.freeze()  # what is loaded stays shared with the forked processes
    with contextlib.suppress(ConnectionError):
        control.sendall(READY)
        while True:
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as job:
                if os.fork() == 0:
                    control.close()
                    if kind == MASKS:
                        _run_mask_worker(job, info)
                    else:
                        _run(job, info, CompileLimits(**json.loads(limits)))


def _run_mask_worker(connection: socket.socket, info: Any) -> None:
    """Serve masks until the connection is closed, and exit. This does not end with the compile server."""
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(ConnectionError):
            serve_masks(connection, info)
    finally:
        os._exit(0)


def _run(job: socket.socket, info: Any, limits: CompileLimits) -> None:
    """Answer one job, and exit."""
    try:
        os.nice(NICENESS)
        _limit_resources(limits)
        job.sendall(STARTED)
        with job.makefile("rb") as stream:
            spec = stream.read()
        status, content = _compile(spec, info, limits.result_bytes)
        if status:
            job.sendall(status + len(content).to_bytes(LENGTH_BYTES, "big") + content)
    finally:
        os._exit(0)  # without the exit handlers of the process from which this one was forked


def _limit_resources(limits: CompileLimits) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limits.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(limits.elapsed_s)  # not handled, so it kills


def _compile(spec: bytes, info: Any, result_bytes: int) -> tuple[bytes, bytes]:
    """Return OK and the compiled grammar, or ERROR and a message; both empty if the grammar exceeds a limit."""
    from xgrammar import GrammarCompiler

    try:
        grammar = build_grammar(json.loads(spec))
        compiled = GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(grammar)
        result = compiled.serialize_json().encode()
        affordable = len(result) <= result_bytes and _follows_within_budget(compiled, info.vocab_size)
    except MemoryError:
        return b"", b""
    except (RuntimeError, ValueError) as error:
        if "bad_alloc" in str(error):
            return b"", b""
        return ERROR, str(error)[:MAX_MESSAGE_CHARS].encode(errors="replace")
    return (OK, result) if affordable else (b"", b"")


def _follows_within_budget(compiled: Any, vocab_size: int) -> bool:
    """Generate a random output that follows the grammar, and return whether its masks keep to their CPU time."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    matcher, mask_1W = GrammarMatcher(compiled), allocate_token_bitmask(1, vocab_size)
    choose = random.Random(0).choice  # always the same output, so that every instance comes to the same result
    started = time.process_time()
    for num_tokens in range(TRIAL_TOKENS):
        mask_started = time.process_time()
        matcher.fill_next_token_bitmask(mask_1W, 0)
        if time.process_time() - mask_started > MAX_MASK_CPU_S:
            return False
        words = mask_1W.view(torch.uint8).numpy()
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little", count=vocab_size))
        if not allowed.size or not matcher.accept_token(int(choose(allowed))) or matcher.is_terminated():
            return True
        if time.process_time() - started > mask_budget_s(num_tokens + 1):
            return False
    return True


def _tokenizer_info(model: str, vocab_size: int, eos_token_ids: list[int]) -> Any:
    from transformers import AutoTokenizer
    from xgrammar import TokenizerInfo

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids)


if __name__ == "__main__":
    main(sys.argv[1:])
