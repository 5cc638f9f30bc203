"""Checks grammars of structured output before their requests are admitted, by compiling them within limits.

Each key has one grammar compiled at a time, and the keys take turns at the two threads, so expensive grammars of one key only
delay grammars of that key that the router has not seen yet. Verdicts are cached.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from pdserve.errors import BadRequest, Overloaded
from pdserve.grammars.cache import BoundedCache
from pdserve.grammars.compiler import GrammarCompiler, start_early
from pdserve.grammars.limits import GrammarTooComplex
from pdserve.router.backend import ModelInfo

COMPILE_THREADS = 2
MAX_WAITING = 16  # different grammars of one key
CACHE_ENTRIES = 4096  # verdicts
CACHE_BYTES = 2**20


class GrammarChecker:
    """Decides whether a grammar can be used. Lives on one event loop.

    Args:
        compiler: returns the compiler; called by `start`, or with the first grammar.
        on_result: called for each grammar that is not in the cache: valid, invalid, too_expensive, or failed for a reason
            that is not in the grammar.
    """

    def __init__(
        self, compiler: Callable[[ModelInfo], GrammarCompiler], on_result: Callable[[str], None] = lambda result: None
    ) -> None:
        self._create_compiler = compiler
        self._on_result = on_result
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._verdicts = BoundedCache[str](CACHE_ENTRIES, CACHE_BYTES)  # empty, or why the grammar is rejected
        self._running: dict[tuple[str, str], asyncio.Task[str]] = {}  # by key and digest
        self._num_waiting: Counter[str] = Counter()  # entries of `_running` by key
        self._turns: dict[str, asyncio.Lock] = {}  # by key, while it has entries in `_running`

    def start(self, info: ModelInfo) -> None:
        """Load what compiling needs, in another thread: the first grammar need not wait for it."""
        if info.eos_token_ids:  # else grammars are refused
            self._threads.submit(start_early, self._compiler_for(info))

    async def check(self, key: str, spec: str, info: ModelInfo) -> None:
        """Return if the specification can be compiled within the limits.

        Args:
            key: name of the API key.

        Raises:
            BadRequest: it cannot.
            Overloaded: too many different grammars of the key are waiting.
        """
        digest = sha256(spec.encode()).hexdigest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await asyncio.shield(self._task(key, digest, spec, info))
        if verdict:
            raise BadRequest(verdict, kind="invalid_grammar")

    @property
    def num_waiting(self) -> int:
        """Number of grammars that wait to be compiled or are being compiled."""
        return len(self._running)

    def close(self) -> None:
        """End the compile server and what it compiles."""
        if self._compiler is not None:
            self._compiler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _task(self, key: str, digest: str, spec: str, info: ModelInfo) -> "asyncio.Task[str]":
        task = self._running.get((key, digest))
        if task is None:
            if self._num_waiting[key] >= MAX_WAITING:
                message = f"{MAX_WAITING} new grammars of this key are waiting to be compiled; try again later"
                raise Overloaded(message, kind="grammars_waiting", retry_after_s=1)
            self._num_waiting[key] += 1
            task = self._running[key, digest] = asyncio.create_task(self._compile_in_turn(key, digest, spec, info))
            task.add_done_callback(lambda done: self._forget(key, digest, done))
        return task

    def _forget(self, key: str, digest: str, task: "asyncio.Task[str]") -> None:
        if not task.cancelled():
            self._on_result(_name_result(task))
        del self._running[key, digest]
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key], self._turns[key]

    async def _compile_in_turn(self, key: str, digest: str, spec: str, info: ModelInfo) -> str:
        async with self._turns.setdefault(key, asyncio.Lock()):
            compiler = self._compiler_for(info)
            verdict = await asyncio.get_running_loop().run_in_executor(self._threads, _verdict, compiler, spec)
        self._verdicts.put(digest, verdict, len(verdict))
        return verdict

    def _compiler_for(self, info: ModelInfo) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = self._create_compiler(info)
        return self._compiler


def _name_result(task: "asyncio.Task[str]") -> str:
    error = task.exception()
    if isinstance(error, GrammarTooComplex):
        return "too_expensive"
    if error is not None:
        return "failed"
    return "invalid" if task.result() else "valid"


def _verdict(compiler: GrammarCompiler, spec: str) -> str:
    """Return why a specification is rejected; empty if it does not. A limit that is exceeded stays an error."""
    try:
        compiler.compile(spec)
    except GrammarTooComplex:
        raise
    except BadRequest as error:
        return str(error)
    return ""
