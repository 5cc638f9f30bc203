"""The processes behind an LLM: those of `pdserve up`, on a free port of the loopback address."""

import atexit
import threading
from collections import deque
from concurrent.futures import Future

from pdserve.cli.deployment import Deployment
from pdserve.config import UpConfig
from pdserve.errors import SetupError

POLL_S = 0.1


class Fleet:
    """Starts a deployment and supervises it in a thread, until `close` or the end of the program.

    Attributes:
        url: base URL of the router.

    Raises:
        SetupError: a process cannot start; the text ends with what the processes printed.
    """

    def __init__(self, config: UpConfig) -> None:
        self._stop = threading.Event()
        self._lines: deque[str] = deque(maxlen=20)
        self._ready: Future[str] = Future()
        self._deployment = Deployment(config, self._lines.append)
        # The children end with the thread that starts them.
        self._thread = threading.Thread(target=self._supervise, name="pdserve-fleet", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.url = self._ready.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop all processes and remove their shared memory. Further calls do nothing."""
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _supervise(self) -> None:
        try:
            with self._deployment as deployment:
                while not self._stop.is_set() and not deployment.poll_ready():
                    self._stop.wait(POLL_S)
                self._ready.set_result(deployment.url)
                while not self._stop.wait(POLL_S):
                    deployment.check_children()
        except (SetupError, OSError) as error:
            if self._ready.done():
                raise
            self._ready.set_exception(SetupError("\n".join([str(error), *self._lines])))
