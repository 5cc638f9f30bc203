"""`gated+nixl://?gate=<folder>`: nixl:// whose readers wait in the middle of a read while there is a file `shut`.

A reader that waits says so by a file `reading.<pid>`.
"""

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from pdserve.kv_transfer.nixl import NixlConnector
from pdserve.kv_transfer.url import Query

BEFORE = 2  # reads of one bounce buffer's piece each: some have arrived, others have not


class GatedNixl(NixlConnector):
    API_VERSION: ClassVar[int] = 1

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("gated+"))

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._gate = Path(query.text("gate", "."))
        self._begun = 0

    def open(self) -> None:
        super().open()
        assert self._agent is not None
        self._begin = self._agent.begin
        self._agent.begin = self._begin_and_wait  # type: ignore[method-assign]

    def _begin_and_wait(self, transfer: Any) -> bool:
        over = self._begin(transfer)
        shut = self._gate / "shut"
        self._begun = self._begun + 1 if shut.exists() else 0
        if self._begun > BEFORE:
            (self._gate / f"reading.{os.getpid()}").touch()
            while shut.exists():
                time.sleep(0.005)
        return over
