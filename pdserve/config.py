"""Every setting of every command: each default is written here, once, and each flag is derived from its field.

`flag("…")` gives a field its default and its line of help. The command line turns `max_num_seqs` into `--max-num-seqs`.
"""

import re
from dataclasses import MISSING, dataclass, field
from itertools import combinations
from typing import Any

from pdserve.slo import Slo

DEFAULT_CONNECTOR = "shm://default"
DEFAULT_PORT = 8000
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("reference", "cpu", "triton")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOG_FORMATS = ("text", "json")
LOG_HELP = "of log lines: text, or json, an object for each line"
STORE_GENERATED = ("auto", "on", "off")
DEFAULT_CONTROL_PORT = 8001
LOCAL_PREFILL_HELP = "decode computes prompts with so few uncached tokens itself; 0: none; default: by forecast"
SLO_HELP = "refuse requests that would break this by forecast, such as ttft=500ms,itl=50ms; empty: none"
OTLP_HELP = "where traces of requests go, by OTLP over HTTP, such as http://collector:4318; empty: nowhere"
KEYS_FILE_HELP = "TOML file of further API keys, each with its limits and its weight; empty: none"
POLICY_HELP = "how P and D are picked: auto, round_robin, least_loaded, power_of_two, session, prefix_aware"


def flag(help: str, default: Any = MISSING, *, secret: bool = False) -> Any:
    """A dataclass field with its line of help."""
    return field(default=default, repr=not secret, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str = flag("a local directory, a hub id, or `demo` for the bundled model", "demo")
    served_model_name: str = flag("the name that clients use; empty: the value of --model", "")

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    dtype: str = flag("of weights and KV: auto (the checkpoint's), float32, bfloat16, float16", "auto")
    device: str = flag("auto, cpu, cuda, cuda:1, …", "auto")
    block_size: int = flag("tokens in a KV block", 16)
    num_blocks: int | None = flag("KV blocks in the pool; default: what the memory allows", None)
    kv_cache_memory: str | None = flag("bytes for the pool, such as 4GiB; default: see --gpu-memory-utilization", None)
    gpu_memory_utilization: float = flag("share of the GPU's memory for weights, activations and pool together", 0.9)
    swap_space: float = flag("GiB of host memory for the KV of preempted sequences; 0: computed or loaded again", 0.0)
    max_model_len: int | None = flag("prompt plus output tokens at most; default: the model's context", None)
    max_num_seqs: int = flag("sequences in the running batch at most", 64)
    max_num_batched_tokens: int = flag("tokens in one step at most: the chunk of a chunked prefill", 2048)
    itl_target_ms: float | None = flag(
        "ms between two tokens, by forecast, up to which prompts are computed beside those that decode; default: any",
        None,
    )
    scheduling_policy: str = flag("who goes first: fcfs, or priority, the request field, lower first", "fcfs")
    kernel: str = flag("attention kernel: auto, reference, cpu, triton", "auto")
    threads: int | None = flag("CPU threads of this instance; default: torch's", None)
    seed: int = flag("of the instance's own random state; requests bring theirs", 0)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
        if self.kernel not in ("auto", *KERNELS):
            raise ValueError(f"kernel {self.kernel!r} is unknown; there are auto, {', '.join(KERNELS)}")
        if self.itl_target_ms is not None and self.itl_target_ms <= 0:
            raise ValueError(f"--itl-target-ms must be more than 0, not {self.itl_target_ms}")
        if self.swap_space < 0:
            raise ValueError(f"--swap-space must be 0 or more GiB, not {self.swap_space}")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"--scheduling-policy is {' or '.join(SCHEDULING_POLICIES)}, not {self.scheduling_policy!r}"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device {self.device!r} is not supported; use auto, cpu, cuda or cuda:1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)


@dataclass(frozen=True, kw_only=True)
class TransferConfig(EngineConfig):
    connector: str = flag(
        "where KV blocks go, such as shm://name?size=1GiB or redis://host:6379/0; `pdserve connector list` has all schemes",
        DEFAULT_CONNECTOR,
    )
    lease_seconds: float = flag("how long stored KV waits to be loaded before the store may evict it", 60.0)
    max_inflight_bytes: str | None = flag(
        "KV bytes on their way to or from the store; default: 512MiB, or two steps, and at most half of the pool",
        None,
    )
    store_generated: str = flag("store the KV of output too, for the next turn: auto (of chats), on, off", "auto")

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        super().__post_init__()
        if self.max_inflight_bytes is not None:
            parse_size(self.max_inflight_bytes)
        if self.lease_seconds < 0:
            raise ValueError(f"--lease-seconds must be 0 or more, not {self.lease_seconds}")
        if self.store_generated not in STORE_GENERATED:
            raise ValueError(f"--store-generated is {', '.join(STORE_GENERATED)}, not {self.store_generated!r}")


@dataclass(frozen=True, kw_only=True)
class ControlConfig(ModelConfig):
    control_certfile: str = flag(
        "certificate chain in PEM: routers and instances speak TLS and show one to each other; with the next two", ""
    )
    control_keyfile: str = flag("its private key in PEM", "")
    control_cafile: str = flag("in PEM, the authorities that sign the other side's certificate", "")


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(ControlConfig, TransferConfig):
    router: str = flag(
        "control addresses of the routers to serve, host:port, comma separated", f"127.0.0.1:{DEFAULT_CONTROL_PORT}"
    )
    registry: str = flag(
        "in place of --router: the Redis where routers register, such as redis://host:6379/0; empty: none", ""
    )
    control_token: str = flag(
        "what the routers' --control-token says; default: PDSERVE_CONTROL_TOKEN in the environment", "", secret=True
    )
    convert_kv: bool = flag("as decode, take KV of prefill instances with another block size or dtype", False)
    instance_id: str = flag("shown in metrics and timelines; default: role, host and pid", "")
    metrics_port: int | None = flag(
        "serve this instance's own Prometheus metrics here; default: only through the router", None
    )
    log_format: str = flag(LOG_HELP, "text")
    drain_seconds: float = flag("how long running requests may go on in a drain before they are cut off", 25.0)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        super().__post_init__()
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds must be 0 or more, not {self.drain_seconds}")
        if self.metrics_port is not None:
            _check_port("--metrics-port", self.metrics_port)
        if self.registry and self.router != InstanceConfig.router:
            raise ValueError("--router and --registry both say which routers there are; give one of them")
        if not self.routers:
            raise ValueError("--router is empty; write host:port, several with commas between them")
        for address in self.routers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"--router: {address!r} is no address; write host:port, such as 127.0.0.1:8001")
            _check_port(f"the port of --router {address}", int(port), least=1)

    @property
    def routers(self) -> list[str]:
        return [address.strip() for address in self.router.split(",") if address.strip()]


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ControlConfig):
    host: str = flag("address that clients reach", "127.0.0.1")
    port: int = flag("port for clients", DEFAULT_PORT)
    control_host: str = flag("address that instances reach", "127.0.0.1")
    control_port: int = flag("port for instances", DEFAULT_CONTROL_PORT)
    registry: str = flag(
        "the Redis where this router registers, and shares limits of keys, such as redis://host:6379/0; empty: none", ""
    )
    announce_host: str = flag(
        "where instances with a --registry dial this router; default: --control-host; if that is 0.0.0.0, as Redis sees it",
        "",
    )
    policy: str = flag(POLICY_HELP, "auto")
    prefill_policy: str = flag("how prefill instances are picked; empty: as --policy says", "")
    decode_policy: str = flag("how decode instances are picked; empty: as --policy says", "")
    local_prefill_tokens: int | None = flag(LOCAL_PREFILL_HELP, None)
    slo: str = flag(SLO_HELP, "")
    max_requests: int = flag("requests under way at most, each choice counted; more wait", 4096)
    max_queue: int = flag("requests that wait to be let in, in fair order of their keys; more get a 429", 1024)
    lease_seconds: float = flag("an instance silent for this long is dropped", 1.5)
    handover_timeout_seconds: float = flag("a hand-over that makes no progress for this long ends in a 503", 60.0)
    client_timeout_seconds: float = flag(
        "a client that sends nothing of its body, or takes nothing of its answer, for this long is cut off", 60.0
    )
    hedge_prefill_after: float | None = flag(
        "seconds without a first token until a second prefill instance is asked too; default: never", None
    )
    max_body_bytes: int = flag("request bodies larger than this get a 413", 4 * 1024 * 1024)
    max_n: int = flag("choices that one request may ask for, over all its prompts", 64)
    api_key: str = flag(
        "keys that clients have to send, comma separated; default: PDSERVE_API_KEY in the environment, or none is asked for",
        "",
        secret=True,
    )
    keys_file: str = flag(KEYS_FILE_HELP, "")
    admin_key: str = flag(
        "the same for /debug and other paths of operators; default: PDSERVE_ADMIN_KEY in the environment",
        "",
        secret=True,
    )
    control_token: str = flag(
        "what instances have to know to be served with; default: PDSERVE_CONTROL_TOKEN in the environment, or nothing",
        "",
        secret=True,
    )
    ssl_certfile: str = flag("certificate chain in PEM: clients speak TLS; with --ssl-keyfile", "")
    ssl_keyfile: str = flag("its private key in PEM", "")
    otlp_endpoint: str = flag(OTLP_HELP, "")
    cors_origins: str = flag("origins whose web pages may ask, comma separated, or *; empty: none", "")
    log_format: str = flag(LOG_HELP, "text")
    log_requests: bool = flag("log a line for each request that has ended", False)
    drain_seconds: float = flag("how long requests may go on after SIGTERM before they are cut off", 25.0)
    timelines: int = flag("how many finished requests /debug/requests remembers", 1000)
    workers: int = flag(
        "router processes that share --port; the next ones have the next --control-port and --own-port each", 1
    )
    own_port: int | None = flag(
        "a further port for clients and operators, which no other router shares, for metrics; default: none", None
    )
    reuse_port: bool = flag("share --port with other routers of this machine that say so too", False)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        for name in (
            "lease_seconds",
            "handover_timeout_seconds",
            "client_timeout_seconds",
            "max_body_bytes",
            "max_n",
            "timelines",
            "max_requests",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, not {self.workers}")
        self._check_ports()
        if self.workers > 1 and not (self.port and self.control_port):
            raise ValueError(
                "--workers needs a --port and a --control-port other than 0, which each would choose for itself"
            )
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds must be 0 or more, not {self.drain_seconds}")
        if self.max_queue < 0:
            raise ValueError(f"--max-queue must be 0 or more, not {self.max_queue}")
        Slo.parse(self.slo)
        for origin in map(str.strip, self.cors_origins.split(",") if self.cors_origins else ()):
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+", origin):
                raise ValueError(f"--cors-origins: {origin!r} is no origin; write such as https://example.com, or *")
        if self.local_prefill_tokens is not None and self.local_prefill_tokens < 0:
            raise ValueError(f"--local-prefill-tokens must be 0 (never) or more, not {self.local_prefill_tokens}")
        if self.hedge_prefill_after is not None and self.hedge_prefill_after <= 0:
            raise ValueError(f"--hedge-prefill-after must be more than 0, not {self.hedge_prefill_after}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("--ssl-certfile and --ssl-keyfile belong together: give both or none")

    def _check_ports(self) -> None:
        """Workers share --port, and each has its own of the others, from the one that is named upwards."""
        first = {"--port": self.port, "--control-port": self.control_port}
        if self.own_port is not None:
            _check_port("--own-port", self.own_port, least=1)
            first["--own-port"] = self.own_port
        ports = {flag: range(port, port + (1 if flag == "--port" else self.workers)) for flag, port in first.items()}
        for flag, own in ports.items():
            _check_port(flag, own[0])
            _check_port(f"{flag} of the last of --workers {self.workers}", own[-1])
        for (flag, own), (other, others) in combinations(ports.items(), 2):
            if shared := (set(own) & set(others)) - {0}:
                raise ValueError(f"{flag} and {other} are both {min(shared)}; each needs another, and each worker too")


@dataclass(frozen=True, kw_only=True)
class UpConfig(ControlConfig, TransferConfig):
    prefill: int = flag("prefill instances", 1)
    decode: int = flag("decode instances", 1)
    both: int = flag("instances that do both", 0)
    workers: int = flag("router processes that share --port", 1)
    host: str = flag("address that clients reach", "127.0.0.1")
    port: int = flag("port for clients", DEFAULT_PORT)
    control_port: int = flag("port for instances; 0 takes a free one", 0)
    policy: str = flag(POLICY_HELP, "auto")
    prefill_policy: str = flag("how prefill instances are picked; empty: as --policy says", "")
    decode_policy: str = flag("how decode instances are picked; empty: as --policy says", "")
    local_prefill_tokens: int | None = flag(LOCAL_PREFILL_HELP, None)
    slo: str = flag(SLO_HELP, "")
    otlp_endpoint: str = flag(OTLP_HELP, "")
    keys_file: str = flag(KEYS_FILE_HELP, "")

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that can never work."""
        super().__post_init__()
        for name in ("prefill", "decode", "both"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more, not {getattr(self, name)}")
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, not {self.workers}")
        _check_port("--port", self.port, least=1)
        _check_port("--control-port", self.control_port)
        if self.port == self.control_port:
            raise ValueError(f"--port and --control-port are both {self.port}; clients and instances need one each")


def _check_port(what: str, port: int, least: int = 0) -> None:
    if not least <= port <= 65535:
        raise ValueError(f"{what} must be from {least} to 65535, not {port}")


def parse_size(text: str) -> int:
    """Bytes from `4GiB`, `512M`, `1048576`. K, M, G, T are powers of 1024, with or without `iB` or `B`.

    Raises:
        ValueError: not a size.
    """
    number = text.strip().rstrip("Bb").rstrip("i").rstrip()
    factor = 1
    if number and number[-1].upper() in "KMGT":
        factor = 1024 ** ("KMGT".index(number[-1].upper()) + 1)
        number = number[:-1]
    try:
        size = int(float(number) * factor)
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write bytes, or such as 512MiB or 4GiB") from None
    if size <= 0:
        raise ValueError(f"{text!r} must be more than 0 bytes")
    return size
