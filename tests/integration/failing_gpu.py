"""`gpu+shm://…?marks=<folder>`: shm:// of an instance whose GPU fails, as torch reports it.

Marks are files: `failed.<pid>` lets the next call of the engine thread in that process raise what torch raises after an Xid;
with `too-small`, the start does what Triton does if a kernel needs more than the GPU has.
"""

import os
from pathlib import Path
from typing import ClassVar

import torch

from pdserve.kv_transfer.connector import Stats
from pdserve.kv_transfer.connectors.shm.connector import ShmConnector
from pdserve.kv_transfer.url import Query


class OutOfResources(Exception):
    """Stands in for Triton's."""


class OnFailingGPU(ShmConnector):
    API_VERSION: ClassVar[int] = 2

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("gpu+"))

    def configure(self, query: Query) -> None:
        super().configure(query)
        self._marks = Path(query.text("marks", "."))

    def open(self) -> None:
        if (self._marks / "too-small").exists():
            raise OutOfResources("out of resource: shared memory, Required: 114944, Hardware limit: 101376. Reducing …")
        super().open()

    def stats(self) -> Stats:
        if (self._marks / f"failed.{os.getpid()}").exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors …")
        return super().stats()
