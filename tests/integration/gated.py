"""`gated+nixl://?gate=<folder>`: nixl:// whose reads pause halfway while the file `shut` exists in that folder.

A paused reader creates the file `reading.<pid>`.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pdserve.kv_transfer.connectors.nixl.connector import NixlConnector
from pdserve.kv_transfer.url import Query

READS_BEFORE_PAUSE = 2  # each reads one piece of a bounce buffer, so the pause falls in the middle of a transfer


class GatedNixl(NixlConnector):
    API_VERSION: ClassVar[int] = 2

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("gated+"))

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._gate = Path(query.text("gate", "."))
        self._reads_while_shut = 0

    def open(self) -> None:
        super().open()
        self._opening.join()
        for reader in self._readers:
            agent = reader._agent
            agent.start_read = partial(self._start_read_and_pause, agent.start_read)  # type: ignore[method-assign]  # wrapped

    def _start_read_and_pause(self, start_read: Callable[[Any], bool], transfer: Any) -> bool:
        is_finished = start_read(transfer)
        shut = self._gate / "shut"
        self._reads_while_shut = self._reads_while_shut + 1 if shut.exists() else 0
        if self._reads_while_shut > READS_BEFORE_PAUSE:
            (self._gate / f"reading.{os.getpid()}").touch()
            while shut.exists():
                time.sleep(0.005)
        return is_finished
