"""`gated+nixl://?admission=<folder>`: nixl:// whose readers wait in the middle of a read while there is a file `shut`.

A reader that waits says so by a file `reading.<pid>`.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pdserve.kv_transfer.connectors.nixl_connector import NixlConnector
from pdserve.kv_transfer.url import Query

BEFORE = 2  # reads of one bounce buffer's piece each: some have arrived, others have not


class GatedNixl(NixlConnector):
    API_VERSION: ClassVar[int] = 1

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("gated+"))

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._admission = Path(query.text("gate", "."))
        self._begun = 0

    def open(self) -> None:
        super().open()
        self._opening.join()
        for reader in self._readers:
            agent = reader._agent
            agent.start_read = partial(self._begin_and_wait, agent.start_read)  # type: ignore[method-assign]  # what a gate is

    def _begin_and_wait(self, begin: Callable[[Any], bool], transfer: Any) -> bool:
        over = begin(transfer)
        shut = self._admission / "shut"
        self._begun = self._begun + 1 if shut.exists() else 0
        if self._begun > BEFORE:
            (self._admission / f"reading.{os.getpid()}").touch()
            while shut.exists():
                time.sleep(0.005)
        return over
