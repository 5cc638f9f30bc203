"""API key limits enforced across the routers of one machine, through accounts in a file. For routers without a registry.

The file holds one JSON object: per key, the level of each rate and the choices that each router has running or queued. Each
router decides from its local copies and exchanges them ten times a second, with the guarantees of `shared_quota`.
"""

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pdserve.errors import SetupError
from pdserve.router.limits.account import settle
from pdserve.router.limits.quota import Quota
from pdserve.router.limits.shared_quota import SYNC_INTERVAL_S

log = logging.getLogger(__name__)


class AccountFile:
    """Keeps the quotas of one router in step with the accounts in a file. It never waits for another router.

    Raises:
        SetupError: the file cannot be opened.
    """

    def __init__(self, path: str, router_id: str, quotas: Mapping[str, Quota]) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"--quota-file {path}: {error.strerror}") from error
        self._router_id = router_id
        self._quotas = {name: quota for name, quota in quotas.items() if quota.is_limited}

    async def run(self) -> None:
        """Synchronise until cancelled."""
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            try:
                self.sync(time.monotonic())  # the same clock in all processes of a machine
            except OSError as error:
                log.warning("quotas are not shared with other routers at the moment: %s", error)

    def sync(self, now: float) -> None:
        """Report the local use of each changed quota and apply the shared levels; not while another router does so.

        Raises:
            OSError: the file cannot be read or written.
        """
        changed = {name: quota for name, quota in self._quotas.items() if quota.needs_sync}
        if not changed:
            return
        with self._lock() as is_held:
            if not is_held:
                return
            accounts = self._read()
            settled = []
            for name, quota in changed.items():
                account = accounts.setdefault(name, {"choices": {}, "rates": {}})
                settled.append((quota, settle(account, self._router_id, quota.report(), now)))
            try:
                self._write(accounts)  # first: if it fails, the same use is reported again
            except OSError:
                for quota in changed.values():
                    quota.keep()
                raise
            for quota, shared in settled:
                quota.update(**shared, now=now)

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _read(self) -> dict[str, Any]:
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        try:
            accounts: dict[str, Any] = json.loads(data or b"{}")
        except ValueError:
            log.warning("the quotas that routers share were damaged, perhaps by a killed router: they start anew")
            accounts = {}
        return accounts

    def _write(self, accounts: dict[str, Any]) -> None:
        data = json.dumps(accounts).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))
