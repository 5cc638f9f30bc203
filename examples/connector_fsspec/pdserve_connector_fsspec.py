"""`fsspec+s3://bucket/prefix`, `fsspec+file:///mnt/kv`, `fsspec://protocol/path`: KV blocks in any fsspec file system.

    path/<namespace>/<key>     one block: header, payload
    path/tmp/                  blocks being written, on file systems; an object store needs none

Credentials and end points are configured for fsspec: by its configuration files and the environment variables of each back
end (AWS_*, …). Only corrupt blocks are ever deleted: give the bucket a lifecycle rule, or delete old files yourself.
"""

import contextlib
import errno
import uuid
from dataclasses import replace
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]  # it has no stubs

from pdserve.errors import SetupError
from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.header import HEADER_BYTES
from pdserve.kv_transfer.threaded import Full, ThreadedConnector
from pdserve.kv_transfer.url import Query

# Uploads to these protocols are atomic. With others, a block is written to a temporary file and renamed.
ATOMIC_UPLOADS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory"}
NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


class FsspecConnector(ThreadedConnector):
    """Stores each block as a file or object of an fsspec file system."""

    API_VERSION: ClassVar[int] = 2
    scheme: ClassVar[str] = "fsspec"
    # Each back end raises the exceptions of its client library. None of them may end a request.
    faults = (Exception,)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, one_process=self._protocol == "memory")

    def configure(self, query: Query) -> None:
        scheme, _, rest = self.url.partition("?")[0].partition("://")
        self._protocol = scheme.lower().removeprefix("fsspec").removeprefix("+")
        if not self._protocol:
            self._protocol, _, rest = rest.partition("/")
            rest = f"/{rest}" if self._protocol in ("file", "local") else rest
        if not self._protocol or not rest.strip("/"):
            raise SetupError(f"{self.url!r} is not of the form fsspec+protocol://path or fsspec://protocol/path.")
        self._root = rest.rstrip("/")

    def open(self) -> None:
        # No cached listings, because other processes write here, too. No cached instance: one client per connector.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs = fsspec.filesystem(self._protocol, **options)
            self._root = self._fs._strip_protocol(self._root)
            self._has_atomic_uploads = self._protocol in ATOMIC_UPLOADS
            for folder in (self.namespace.hex(), "tmp"):
                self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self.contains("probe")
        except Exception as error:
            raise SetupError(f"{self.url} cannot be used: {type(error).__name__}: {error}") from error

    def put(self, name: str, header: bytes, payload: memoryview, lease_s: float) -> None:
        value = b"".join((header, payload))
        try:
            if self._has_atomic_uploads:
                self._fs.pipe_file(self._path(name), value)
            else:
                self._put_and_rename(self._path(name), value)
        except OSError as error:
            if error.errno in NO_SPACE_ERRNOS:
                raise Full from None
            raise

    def _put_and_rename(self, path: str, value: bytes) -> None:
        temporary = f"{self._root}/tmp/{uuid.uuid4().hex}"
        try:
            self._fs.pipe_file(temporary, value)
            self._fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def renew(self, name: str, lease_s: float) -> bool:
        return self.contains(name)  # there are no leases to extend

    def get(self, name: str) -> bytes | None:
        try:
            value: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return value

    def contains(self, name: str) -> bool:
        try:
            return int(self._fs.info(self._path(name))["size"]) - HEADER_BYTES in self.payload_lengths
        except FileNotFoundError:
            return False

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
