"""Writers of the conformance kit: processes that are forked to store, and do not outlive the kit."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def test_writers_end_with_their_parent(tmp_path: Path) -> None:
    """Also one that waits for its signal: a rule that ends early kills the parent."""
    command = [sys.executable, "-m", "pdserve.kv_transfer.rules.writer", f"file://{tmp_path}", "m"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        print(json.dumps({"seed": 0, "passes": 1, "lease_s": 0.0}), file=parent.stdin, flush=True)
        messages = {one["what"]: one["value"] for one in (json.loads(parent.stdout.readline()) for _ in range(2))}
        writer = os.pidfd_open(messages["pid"])
        assert "ready" in messages and not select.select([writer], [], [], 0)[0]
        parent.kill()
    try:
        assert select.select([writer], [], [], 60)[0], "it waits for ever"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(writer, signal.SIGKILL)
        os.close(writer)
