"""The compile server: loads llguidance and a vocabulary once, and then forks a process with limits for each grammar.

It also forks mask workers (`mask_worker.py`).

    python -m pdserve.grammars.compile_server SOCKET MODEL VOCAB_SIZE EOS_TOKEN_IDS LIMITS

SOCKET is the descriptor of a Unix stream socket; the last two arguments are JSON. The server first sends READY. Then it
receives descriptors of sockets, each with one byte: MASKS for a mask worker's connection, or COMPILE. From the latter, the
forked process reads the specification of a grammar up to its end, and it writes STARTED, and then OK or ERROR, a length in 4
bytes, and the grammar in Lark's syntax or a message. A process that exceeds a limit, or whose stack llguidance overflows,
dies, and the last that it writes begins with one of EXCEEDED; one that writes none was lost for another reason. What it had
allocated goes with it, so a grammar cannot leave anything behind.

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

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.grammars.limits import EXCEEDED, MAX_MASK_CPU_S, CompileLimits, mask_budget_s
from pdserve.grammars.mask_worker import build_matcher, encoded_message, report_limits, serve_masks
from pdserve.grammars.vocabulary import Vocabulary
from pdserve.priority import NICENESS, lower_session

READY, COMPILE, MASKS = b"r", b"c", b"m"
STARTED, OK, ERROR = b".", b"+", b"-"
LENGTH_BYTES = 4
TRIAL_TOKENS = 64


class Loaded:
    """A vocabulary and llguidance's tokenizer of it."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        vocabulary = Vocabulary(model, vocab_size, eos_token_ids)
        self.special, self.vocab_size = vocabulary.special, vocab_size
        self.tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=eos_token_ids)


def main(arguments: list[str]) -> None:
    """Serve until the client closes its end."""
    descriptor, model, vocab_size, eos_token_ids, limits_json = arguments
    control = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended processes are reaped by the kernel
    loaded = Loaded(model, int(vocab_size), json.loads(eos_token_ids))
    limits = CompileLimits(**json.loads(limits_json))
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forked processes
    lower_session()
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
                        _run_mask_worker(job, loaded, limits)
                    else:
                        _run(job, loaded, limits)


def _run_mask_worker(connection: socket.socket, loaded: Loaded, limits: CompileLimits) -> None:
    """Serve masks until the connection is closed, and exit. This does not end with the compile server."""
    try:
        os.setsid()
        _limit_memory(limits)
        with contextlib.suppress(ConnectionError):
            try:
                serve_masks(connection, loaded.tokenizer, loaded.special, limits.cpu_s)
            except MemoryError:
                connection.sendall(EXCEEDED[:1])
    finally:
        os._exit(0)


def _run(job: socket.socket, loaded: Loaded, limits: CompileLimits) -> None:
    """Answer one job, and exit."""
    try:
        os.nice(NICENESS)
        _limit_memory(limits)
        report_limits(job, signal.SIGXCPU)  # not SIGALRM, which ends a process that hangs
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))  # a signal, and the kernel's kill
        signal.alarm(limits.elapsed_s)
        job.sendall(STARTED)
        with job.makefile("rb") as stream:
            spec = stream.read()
        status, content = _compile(spec, loaded)
        job.sendall(status + len(content).to_bytes(LENGTH_BYTES, "big") + content)
    finally:
        os._exit(0)  # without the exit handlers of the process from which this one was forked


def _limit_memory(limits: CompileLimits) -> None:
    """Limit the memory of this process, and keep what llguidance writes when it dies of that from the log."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limits.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _compile(spec: bytes, loaded: Loaded) -> tuple[bytes, bytes]:
    """Return OK and the grammar, ERROR and a message, or one of EXCEEDED and nothing if the grammar exceeds a limit."""
    try:
        grammar, matcher = build_matcher(spec, loaded.tokenizer, loaded.special)
        is_cheap = _follows_within_budget(matcher, loaded.vocab_size)
    except MemoryError:
        return EXCEEDED[:1], b""
    except ValueError as error:
        return ERROR, encoded_message(error)
    return (OK, grammar.encode()) if is_cheap else (EXCEEDED[:1], b"")


def _follows_within_budget(matcher: LLMatcher, vocab_size: int) -> bool:
    """Generate a random output that follows the grammar, and return whether its masks keep to their CPU time."""
    drawn = random.Random(0)  # always the same output, so that every instance comes to the same result
    started = time.thread_time()
    for num_tokens in range(TRIAL_TOKENS):
        mask_started = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error() or time.thread_time() - mask_started > MAX_MASK_CPU_S:
            return False
        if not matcher.consume_token(_first_allowed(mask, drawn.randrange(vocab_size))):
            return False
        if matcher.is_stopped():
            return True
        if time.thread_time() - started > mask_budget_s(num_tokens + 1):
            return False
    return True


def _first_allowed(mask: bytes, start: int) -> int:
    """Return the first token from `start` on that a mask allows; from 0 on if there is none."""
    bits = int.from_bytes(mask, "little")
    if not bits >> start:
        start = 0
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


if __name__ == "__main__":
    main(sys.argv[1:])
