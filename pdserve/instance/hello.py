"""The Hello of an instance: its first frame to a router, which tells what it is and can do."""

import os
import secrets
import socket
import time
from dataclasses import asdict
from pathlib import Path

from pdserve import __version__
from pdserve.config import InstanceConfig
from pdserve.control.frame_connection import NONCE_BYTES, PROTOCOL_VERSION
from pdserve.instance.instance import Instance
from pdserve.proto import pdserve_pb2 as pb

MAX_MODEL_CHARS = 100  # of the draft model's name: a router refuses what is longer than 200 in all


def make_hello(role: str, config: InstanceConfig, instance: Instance) -> pb.Hello:
    """Return the Hello of a new incarnation of the instance."""
    engine = instance.engine
    pooling = engine.checkpoint.pooling
    return pb.Hello(
        instance_id=config.instance_id or f"{role}-{socket.gethostname()}-{os.getpid()}",
        role=role,
        model=config.name,
        namespace=engine.layout.namespace,
        epoch=time.time_ns(),
        nonce=secrets.token_bytes(NONCE_BYTES),
        block_size=engine.layout.block_size,
        num_blocks=engine.runner.kv.num_blocks,
        block_bytes=engine.layout.block_bytes,
        max_model_len=engine.max_model_len,
        vocab_size=engine.checkpoint.vocab_size,
        connector=instance.connector.scheme,
        device=str(engine.checkpoint.device),
        dtype=engine.layout.dtype,
        kernel=engine.runner.kernel.NAME,
        eos_token_ids=sorted(engine.checkpoint.eos_token_ids),
        version=__version__,
        protocol_version=PROTOCOL_VERSION,
        layout=pb.Layout(**asdict(engine.layout)),
        convert_kv=config.convert_kv,
        allow_inexact=config.allow_inexact,
        scheduling_policy=config.scheduling_policy,
        itl_target=(config.itl_target_ms or 0) / 1e3,
        embedding_size=0 if pooling is None else pooling.num_classes or engine.checkpoint.hidden_size,
        classifies=pooling is not None and pooling.num_classes > 0,
        grammars=True,
        adapters=[] if engine.adapters is None else engine.adapters.listing(),
        loads_adapters=bool(config.lora_folder),
        speculate="off" if engine.drafter is None else _speculation(config),
    )


def _speculation(config: InstanceConfig) -> str:
    """Return the proposer of drafts, with its model's name but not the folder that it is in."""
    name = "".join(filter(str.isprintable, Path(config.speculative_model).name))
    return f"{config.speculate} {name[:MAX_MODEL_CHARS]}".strip()
