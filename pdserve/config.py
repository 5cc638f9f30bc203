"""Settings of all commands: each default is written here once, and each flag is derived from its field (`settings.py`)."""

import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

from pdserve.settings import Settings
from pdserve.settings import flag as flag
from pdserve.sizes import parse_size as parse_size
from pdserve.slo import Slo
from pdserve.speculative_config import SPECULATE, read_speculative

DEFAULT_CONNECTOR = "shm://default"
INTERRUPT_GRACE_S = 5  # for a router's requests to finish after Ctrl-C
DEFAULT_PORT = 8000
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = ("reference", "cpu", "triton", "flash")
SCHEDULING_POLICIES = ("fcfs", "priority")
ROLES = ("prefill", "decode", "both")
LOG_FORMATS = ("text", "json")
LOG_HELP = "format of log lines; json: one object per line"
AUTO_ON_OFF = ("auto", "on", "off")
DEFAULT_CONTROL_PORT = 8001
LOCAL_PREFILL_HELP = (
    "decode computes a prompt itself if at most this many tokens are uncached; 0: never; default: by forecast"
)
TTFT_TARGET_HELP = (
    "TTFT in ms by forecast beyond which prompts go to decode instances that have an --itl-target-ms; default: none do"
)
CONNECTOR_VARIABLE, REGISTRY_VARIABLE = "PDSERVE_CONNECTOR", "PDSERVE_REGISTRY"  # their URLs may hold a password
CONTROL_TOKEN_VARIABLE = "PDSERVE_CONTROL_TOKEN"
SLO_HELP = "reject requests that would miss this SLO by forecast, such as ttft=500ms,itl=50ms; empty: none"
NO_INSTANCE_HELP = "seconds for which requests wait while no instance is available, until they end in a 503; 0: none"
OTLP_HELP = "OTLP/HTTP collector for traces of requests and metrics, such as http://collector:4318; empty: none"
KEYS_FILE_HELP = "TOML file of further API keys, each with quotas and a weight; empty: none"
SHARE_KV_HELP = (
    "let all keys of a --keys-file reuse each other's KV, so that the TTFT tells what others have sent; by default only "
    "keys of one group do"
)
ALLOWED_HOSTS_HELP = (
    "further Host headers for which a router on loopback without API keys answers, comma separated, or *; empty: none"
)
KV_EVENTS_HELP = (
    "publish stores and removals of KV blocks over ZMQ as vLLM does: a JSON object with vLLM's keys; empty: do not"
)
KV_EVENTS_SUBSCRIBE_HELP = (
    "follow publishers of KV events in vLLM's format for the blocks in the KV store: a JSON array of objects with endpoint, "
    "replay_endpoint and topic; empty: none"
)
PARSER_HELP = "parser of the model's {}, by its name in vLLM, such as {}; auto: by the chat template; none: no parsing"
PROFILE_HELP = "profile with which instances compare the times of their steps; empty: that of --paced, if any"
PREFIX_CACHING_HELP = (
    "let requests reuse the KV of earlier ones, in pools and stores; off: only what is handed over for them"
)
WARM_PROMPTS_HELP = (
    "file of prompts and chat bodies, one JSON value a line, which each instance computes when it attaches and after a reset,"
    " and keeps in up to a quarter of its pool; empty: none"
)
VLLM_METRICS_HELP = "export metrics by vLLM's names too, as one series for the whole process"
GRPC_HELP = "port for gRPC: health checks, and vLLM's VllmEngine where pdserve[vllm-grpc] is installed; default: none"
POLICY_NAMES = ("auto", "round_robin", "least_loaded", "power_of_two", "session", "prefix_aware")
POLICIES_GROUP = "pdserve.policies"  # entry points of other packages
PORTS: dict[str, Any] = {"least": 0, "most": 65535}  # 0 takes a free one


def policy_flag(role: str) -> Any:
    """Return the field of the routing policy for instances of a role, which routers and `up` have."""
    return flag(
        f"routing policy for {role} instances; default: --policy", None, choices=POLICY_NAMES, plugins=POLICIES_GROUP
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    GROUP: ClassVar = "Model"

    model: str = flag("a local directory, a hub id, or `demo` for the bundled model", "demo")
    served_model_name: str = flag("model name in the API; empty: the value of --model", "")

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    GROUP: ClassVar = "Engine"
    ONLY_WITH: ClassVar = dict.fromkeys(("max_loras", "max_lora_rank"), ("lora_modules", "lora_folder"))
    NOT_WITH: ClassVar = {
        "speculative_tokens": ("speculate=off",),
        "kv_cache_memory": ("num_blocks", "paced"),
        "gpu_memory_utilization": ("num_blocks", "kv_cache_memory", "device=cpu", "paced"),
        # not --device, which says --device cpu in deployments
        **dict.fromkeys(("dtype", "kv_cache_dtype", "kernel", "quantization"), ("paced",)),
        **dict.fromkeys(("batch_invariant", "async_scheduling", "pooling", "tensor_parallel_size"), ("paced",)),
    }

    dtype: str = flag("dtype of weights and KV; auto: the checkpoint's", "auto", choices=("auto", *DTYPES))
    device: str = flag("device: auto, cpu, cuda, cuda:1, …", "auto")
    tensor_parallel_size: int = flag(
        "devices among which the model of one instance is divided, each with a process of its own", 1, least=1
    )
    block_size: int = flag("tokens per KV block", 16, least=1)
    num_blocks: int | None = flag("KV blocks in the pool; default: as many as the memory allows", None, least=1)
    kv_cache_memory: str | None = flag(
        "bytes for the pool, on each device, such as 4GiB; default: see --gpu-memory-utilization", None
    )
    kv_cache_dtype: str = flag(
        "numbers of the KV; auto: those of the model; int8: in half the bytes, with a scale per token and head (CPUs)",
        "auto",
        choices=("auto", "int8"),
    )
    gpu_memory_utilization: float = flag(
        "share of the GPU's memory for weights, activations and pool together", 0.9, above=0, most=1
    )
    swap_space: float = flag(
        "GiB of host memory for the KV of preempted sequences; 0: recompute or reload it", 0.0, least=0
    )
    max_model_len: int | None = flag("maximum prompt plus output tokens; default: the model's context", None, least=1)
    max_num_seqs: int = flag("maximum sequences in the running batch", 64, least=1)
    max_num_batched_tokens: int = flag(
        "maximum tokens per step, which is the chunk of a chunked prefill", 2048, least=1
    )
    itl_target_ms: float | None = flag(
        "inter-token latency in ms that prefill chunks beside running streams may cause, by forecast; default: unlimited",
        None,
        above=0,
    )
    scheduling_policy: str = flag(
        "order of requests: of arrival (fcfs), or of the request field priority, lower first",
        "fcfs",
        choices=SCHEDULING_POLICIES,
    )
    kernel: str = flag("attention kernel", "auto", choices=("auto", *KERNELS), plugins="pdserve.kernels")
    quantization: str = flag(
        "round 16-bit weights as they are loaded, in groups of 32; KV is exchanged with instances that do the same",
        "none",
        choices=("none", "int8", "int4"),
    )
    batch_invariant: str = flag(
        "in 16 bits, give a token the same bits in any batch and phase; auto: on CPUs",
        "auto",
        choices=AUTO_ON_OFF,
    )
    async_scheduling: str = flag(
        "launch each decode step before the tokens of the last one are read; auto: on GPUs, with one device",
        "auto",
        choices=AUTO_ON_OFF,
    )
    speculate: str = flag(
        "compute tokens that may follow, and keep those that the model samples itself: what has followed the same words in"
        " prompt or answer, last (ngram) or most often (suffix, also in earlier answers of the same key), as much of that"
        " as pays (auto; off on GPUs, with recurrent layers, and where steps are launched ahead), or what a second model"
        " samples (draft); answers stay the same",
        "auto",
        choices=SPECULATE,
    )
    speculative_tokens: int | None = flag(
        "most tokens that a step computes ahead of a sequence; default: 16, or as many of a draft model as pay, up to 8",
        None,
        least=0,
    )
    speculative_model: str = flag(
        "model of --speculate draft, smaller and with the same tokenizer: a local directory or a hub id", ""
    )
    speculative_config: str = flag(
        "as vLLM's: a JSON object with method (ngram, suffix) or model, and num_speculative_tokens, in place of these",
        "",
    )
    lora_modules: str = flag(
        "adapters (LoRA) of PEFT: name=folder or name=hub id, comma separated or repeated; requests name one as their model",
        "",
    )
    lora_folder: str = flag("folder from which POST /v1/load_lora_adapter may load adapters; empty: it loads none", "")
    max_loras: int = flag("most adapters in one step", 8, least=1)
    max_lora_rank: int = flag("highest rank of an adapter", 64, least=1, most=512)
    pooling: str = flag(
        "which hidden states are a text's embedding; auto: as sentence-transformers' files of the model say, else none;"
        " yes-no: scores, by the answer yes or no (Qwen3-Reranker)",
        "auto",
        choices=("auto", "off", "last", "mean", "cls", "yes-no"),
    )
    paced: str = flag(
        "profile by whose times the instance sleeps instead of computing, to try out fleets; its answers are nonsense;"
        " empty: compute",
        "",
    )
    force: bool = flag(
        "use a profile of another model (--paced), or compare one of another model or machine (--compare,"
        " --profile), and say what differs",
        False,
    )
    threads: int | None = flag(
        "CPU threads of this instance; default: torch's own, within the container's quota", None, least=1
    )
    seed: int = flag("seed of the instance; requests have seeds of their own", 0)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"--device must be auto, cpu, cuda or a numbered one such as cuda:1, not {self.device!r}")
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory)
        if self.speculative_config:
            for name, value in read_speculative(self.speculative_config).items():
                if getattr(self, name) not in (getattr(type(self), name), value):
                    raise ValueError(
                        f"--speculative-config says otherwise than --{name.replace('_', '-')}: give one of them"
                    )
                object.__setattr__(self, name, value)
        if (self.speculate == "draft") != bool(self.speculative_model):
            raise ValueError("--speculate draft and --speculative-model belong together: give both or none")
        if self.speculative_model and (self.paced or self.tensor_parallel_size > 1):
            raise ValueError("--speculate draft works on one device that computes: not with --paced or several ranks")
        self.adapters  # noqa: B018 - raises ValueError

    @property
    def draft_length(self) -> int:
        """Most tokens that a step computes ahead of a sequence."""
        if self.speculative_tokens is None:
            return 8 if self.speculate == "draft" else 16
        return self.speculative_tokens

    @property
    def has_adapters(self) -> bool:
        """True if a request may name an adapter: one is given, or may be loaded."""
        return bool(self.lora_modules or self.lora_folder)

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of `--lora-modules` by name. Raises ValueError if that is no such list."""
        found: dict[str, str] = {}
        for entry in filter(None, self.lora_modules.split(",")):
            name, _, path = entry.partition("=")
            if not (name and path) or name in found or name == self.name:
                raise ValueError(
                    f"--lora-modules: write name=folder, each name once and not the model's, not {entry!r}"
                )
            found[name] = path
        return found


@dataclass(frozen=True, kw_only=True)
class TransferConfig(EngineConfig):
    GROUP: ClassVar = "KV transfer"

    connector: str = flag(
        "URL of the KV store, such as shm://name?size=1GiB or redis://host:6379/0; see `pdserve connector list`",
        DEFAULT_CONNECTOR,
        variable=CONNECTOR_VARIABLE,
    )
    lease_seconds: float = flag(
        "seconds for which the store may not evict KV that decode has yet to load", 60.0, least=0
    )
    max_inflight_bytes: str | None = flag(
        "maximum KV bytes in flight to or from the store; default: 512MiB or two steps, at most half of the pool",
        None,
    )
    store_generated: str = flag(
        "store generated KV for the next turn of a chat; auto: of chats only", "auto", choices=AUTO_ON_OFF
    )

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        if self.max_inflight_bytes is not None:
            parse_size(self.max_inflight_bytes)


@dataclass(frozen=True, kw_only=True)
class ControlConfig(ModelConfig):
    GROUP: ClassVar = "TLS between routers and instances"

    control_certfile: str = flag(
        "PEM certificate chain for mutual TLS between routers and instances; needs --control-keyfile and --control-cafile",
        "",
    )
    control_keyfile: str = flag("PEM private key of --control-certfile", "")
    control_cafile: str = flag("PEM certificates of the authorities that signed the peer's certificate", "")


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(ControlConfig, TransferConfig):
    GROUP: ClassVar = "Instance"
    ONLY_WITH: ClassVar = {"vllm_metrics": ("metrics_port",), "force": ("paced", "profile")}

    router: str = flag(
        "control addresses of the routers, host:port, comma separated", f"127.0.0.1:{DEFAULT_CONTROL_PORT}"
    )
    registry: str = flag(
        "Redis in which routers register, such as redis://host:6379/0, in place of --router; empty: none",
        "",
        variable=REGISTRY_VARIABLE,
    )
    control_token: str = flag(
        "secret shared with the routers; empty: none", "", secret=True, variable=CONTROL_TOKEN_VARIABLE
    )
    allow_inexact: bool = flag(
        "as decode, accept 16-bit KV from prefill instances whose processors or kernels round otherwise", False
    )
    convert_kv: bool = flag("as decode, accept KV from prefill instances with another block size or dtype", False)
    instance_id: str = flag("name of this instance in metrics and timelines; default: role, host and pid", "")
    metrics_port: int | None = flag(
        "port for this instance's Prometheus metrics, /health and /ready; default: metrics only through the router",
        None,
        **PORTS,
    )
    vllm_metrics: bool = flag(VLLM_METRICS_HELP, False)
    grpc_health_port: int | None = flag("port for gRPC health checks of this instance; default: none", None, **PORTS)
    kv_events_config: str = flag(KV_EVENTS_HELP, "")
    log_format: str = flag(LOG_HELP, "text", choices=LOG_FORMATS)
    drain_seconds: float = flag(
        "seconds that running requests may take in a drain before they are cut off", 25.0, least=0
    )
    profile: str = flag(PROFILE_HELP, "")

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        if self.registry and self.router != InstanceConfig.router:
            message = "--router and --registry both name the routers; give one of them"
            raise ValueError(f"{message} ({REGISTRY_VARIABLE} counts as --registry)")
        if not self.routers:
            raise ValueError("--router is empty; write host:port, several with commas between them")
        for address in self.routers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"--router: {address!r} is not an address; write host:port, such as 127.0.0.1:8001")
            _check_port(f"the port of --router {address}", int(port), least=1)

    @property
    def routers(self) -> list[str]:
        return [address.strip() for address in self.router.split(",") if address.strip()]


@dataclass(frozen=True, kw_only=True)
class ServingConfig(ControlConfig):
    """Settings of routers that `pdserve up` has, too: all but where one process listens and who knows of it."""

    ONLY_WITH: ClassVar = {
        "share_kv": ("keys_file",),
        **dict.fromkeys(("response_ttl_seconds", "max_stored_responses"), ("response_store",)),
        **dict.fromkeys(("max_batch_bytes", "batch_concurrency"), ("batch_folder",)),
    }
    NOT_WITH: ClassVar = {"warm_prompts": ("prefix_caching=off",), "allowed_hosts": ("api_key", "keys_file")}

    host: str = flag("listen address for clients", "127.0.0.1", group="Clients")
    port: int = flag("port for clients", DEFAULT_PORT, **PORTS)
    grpc_port: int | None = flag(GRPC_HELP, None, package="grpc", **PORTS)
    workers: int = flag(
        "router processes that share --port; each further one takes the next --control-port and --own-port",
        1,
        least=1,
    )
    ssl_certfile: str = flag("PEM certificate chain for TLS with clients; needs --ssl-keyfile", "")
    ssl_keyfile: str = flag("PEM private key of --ssl-certfile", "")
    cors_origins: str = flag("allowed CORS origins, comma separated, or *; empty: none", "")
    allowed_hosts: str = flag(ALLOWED_HOSTS_HELP, "")
    api_key: str = flag(
        "API keys for clients, comma separated; without any, no key is needed",
        "",
        secret=True,
        variable="PDSERVE_API_KEY",
        group="Keys",
    )
    keys_file: str = flag(KEYS_FILE_HELP, "")
    share_kv: bool = flag(SHARE_KV_HELP, False)
    admin_key: str = flag(
        "API keys for /debug, /admin and other operators' paths; empty: none",
        "",
        secret=True,
        variable="PDSERVE_ADMIN_KEY",
    )
    control_token: str = flag(
        "secret that instances must present; without any, none is needed",
        "",
        secret=True,
        variable=CONTROL_TOKEN_VARIABLE,
    )
    max_requests: int = flag(
        "maximum running requests, counting each choice; further ones queue", 4096, least=1, group="Limits of clients"
    )
    max_queue: int = flag(
        "maximum queued requests, admitted in weighted fair order of their keys; further ones get a 429",
        1024,
        least=0,
    )
    max_n: int = flag("maximum choices of one request, over all its prompts", 64, least=1)
    max_body_bytes: int = flag("maximum bytes of a request body; a larger one gets a 413", 4 * 1024 * 1024, least=1)
    max_connections: int | None = flag(
        "maximum open connections of clients; further ones get a 503; default: 3/4 of the file descriptors, at most 16384",
        None,
        least=1,
    )
    client_timeout_seconds: float = flag(
        "seconds after which a client that sends nothing of its body or reads nothing of its answer is disconnected",
        60.0,
        above=0,
        most=86_400,
    )
    policy: str = flag(
        "routing policy for P and D", "auto", choices=POLICY_NAMES, plugins=POLICIES_GROUP, group="Routing"
    )
    prefill_policy: str | None = policy_flag("prefill")
    decode_policy: str | None = policy_flag("decode")
    local_prefill_tokens: int | None = flag(LOCAL_PREFILL_HELP, None, least=0)
    ttft_target_ms: float | None = flag(TTFT_TARGET_HELP, None, above=0)
    slo: str = flag(SLO_HELP, "")
    kv_events_subscribe: str = flag(KV_EVENTS_SUBSCRIBE_HELP, "", package="zmq")
    instance_timeout_seconds: float = flag(
        "seconds of silence after which an instance is dropped", 1.5, above=0, group="Faults"
    )
    handover_timeout_seconds: float = flag(
        "seconds without progress after which a hand-over fails over or ends in a 503", 60.0, above=0
    )
    no_instance_timeout: float = flag(NO_INSTANCE_HELP, 30.0, least=0)
    drain_seconds: float = flag("seconds that requests may take after SIGTERM before they are cut off", 25.0, least=0)
    tool_call_parser: str = flag(PARSER_HELP.format("tool calls", "hermes"), "auto", group="Requests and answers")
    reasoning_parser: str = flag(PARSER_HELP.format("reasoning", "deepseek_r1"), "auto")
    special_tokens_in_messages: bool = flag(
        "read the strings of special tokens in messages and tools as special tokens; by default they are ordinary text",
        False,
    )
    trust_request_chat_template: bool = flag(
        "allow chat_template in requests: it runs in a sandbox, but a malicious one can keep the router busy", False
    )
    unknown_fields: str = flag(
        "what becomes of fields in requests that the router does not know",
        "refuse",
        choices=("refuse", "ignore"),
    )
    sse_keep_alive: float = flag(
        "seconds after which a stream that waits gets its status and a comment, so that proxies keep it; 0: never",
        0.0,
        least=0,
    )
    response_store: str = flag(
        "where /v1/responses keeps responses: memory, or a Redis such as redis://host:6379/0; empty: nowhere",
        "",
        variable="PDSERVE_RESPONSE_STORE",
        package="redis",
        group="Stored responses and batches",
    )
    response_ttl_seconds: float = flag("seconds for which a response is kept", 86_400.0, above=0)
    max_stored_responses: int = flag("maximum responses kept per API key; older ones are dropped", 1000, least=1)
    batch_folder: str = flag(
        "folder of the files and batches of /v1/files and /v1/batches; empty: these are off",
        "",
        package="python_multipart",
    )
    max_batch_bytes: str = flag("maximum bytes of all files in --batch-folder, and of one upload", "1GiB")
    batch_concurrency: int = flag("requests of one batch that run at once", 32, least=1)
    log_format: str = flag(LOG_HELP, "text", choices=LOG_FORMATS, group="Logs, metrics and traces")
    log_requests: bool = flag("log a line for each finished request", False)
    timelines: int = flag("number of finished requests kept for /debug/requests and /debug/traffic", 1000, least=1)
    otlp_endpoint: str = flag(OTLP_HELP, "", package="opentelemetry.sdk")
    vllm_metrics: bool = flag(VLLM_METRICS_HELP, False)
    prefix_caching: str = flag(PREFIX_CACHING_HELP, "on", choices=("on", "off"), group="Prefix cache")
    warm_prompts: str = flag(WARM_PROMPTS_HELP, "")

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        if self.workers > 1 and self.response_store == "memory":
            raise ValueError("--response-store memory is not shared by --workers; name a Redis, which is")
        parse_size(self.max_batch_bytes)
        Slo.parse(self.slo)
        for origin in map(str.strip, self.cors_origins.split(",") if self.cors_origins else ()):
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+", origin):
                raise ValueError(
                    f"--cors-origins: {origin!r} is not an origin; write https://example.com, for example, or *"
                )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("--ssl-certfile and --ssl-keyfile belong together: give both or none")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServingConfig):
    GROUP: ClassVar = "A router's ports"
    ONLY_WITH: ClassVar = {"announce_host": ("registry",), "quota_file": ("keys_file",)}
    NOT_WITH: ClassVar = {"quota_file": ("registry",)}

    control_host: str = flag("listen address for instances", "127.0.0.1")
    control_port: int = flag("port for instances", DEFAULT_CONTROL_PORT, **PORTS)
    registry: str = flag(
        "Redis in which this router registers and shares quotas, such as redis://host:6379/0; empty: none",
        "",
        variable=REGISTRY_VARIABLE,
    )
    announce_host: str = flag(
        "address that instances with a --registry dial; default: --control-host or, if that is 0.0.0.0, as Redis sees it",
        "",
    )
    quota_file: str = flag(
        "file through which routers of one machine share quotas without a --registry; --workers creates one; empty: none",
        "",
    )
    own_port: int | None = flag(
        "additional HTTP port of this router alone, for metrics and operators; default: none", None, least=1, most=65535
    )
    reuse_port: bool = flag("share --port with other routers on this machine that set this flag", False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        self._check_ports()
        if self.workers > 1 and 0 in (self.port, self.control_port, self.grpc_port):
            raise ValueError(
                "--workers needs a --port and a --control-port other than 0: with 0, each worker would take another one"
            )

    def _check_ports(self) -> None:
        """Check the ports of all workers: they share --port and --grpc-port; the others count up from the given one."""
        first = {"--port": self.port, "--control-port": self.control_port}
        if self.own_port is not None:
            first["--own-port"] = self.own_port
        if self.grpc_port is not None:
            first["--grpc-port"] = self.grpc_port
        of_all = ("--port", "--grpc-port")
        ports = {name: range(port, port + (1 if name in of_all else self.workers)) for name, port in first.items()}
        for name, own in ports.items():
            _check_port(f"{name} of the last of --workers {self.workers}", own[-1])
        for (name, own), (other, others) in combinations(ports.items(), 2):
            if shared := (set(own) & set(others)) - {0}:
                raise ValueError(
                    f"{name} and {other} are both {min(shared)}; each of them, and each worker, needs a port of its own"
                )


@dataclass(frozen=True, kw_only=True)
class UpConfig(ServingConfig, TransferConfig):
    GROUP: ClassVar = "Deployment"
    ONLY_WITH: ClassVar = {
        "force": ("paced", "profile"),
        "max_instances": ("autoscale",),
        "ttft_target_ms": ("itl_target_ms", "try_itl_target_ms"),
    }

    on: str = flag(
        "where instances run: processes of this machine, or actors of the Ray cluster that it is in",
        "processes",
        choices=("processes", "ray"),
    )
    prefill: int = flag("prefill instances", 1, least=0)
    decode: int = flag("decode instances", 1, least=0)
    both: int = flag("instances with the role both", 0, least=0)
    control_port: int = flag("port for instances; 0 takes a free one", 0, **PORTS)
    profile: str = flag(PROFILE_HELP, "")
    autoscale: str = flag(
        "targets such as ttft.p90=500ms,itl.p99=50ms, for which a controller changes roles, by --profile; empty: none",
        "",
    )
    max_instances: int = flag(
        "instances altogether, up to which --autoscale starts more; 0: it only changes roles", 0, least=0
    )

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        _check_port("--port", self.port, least=1)  # clients are told it before the router listens
        if self.autoscale and not (self.profile or self.paced):
            raise ValueError("--autoscale needs the --profile of the instances, from which it forecasts")
        if self.port == self.control_port:
            raise ValueError(
                f"--port and --control-port are both {self.port}; clients and instances need separate ports"
            )


@dataclass(frozen=True, kw_only=True)
class DemoConfig(UpConfig):
    ONLY_WITH: ClassVar = dict.fromkeys(("api_key", "admin_key", "autoscale", "max_instances"), ())


def _check_port(what: str, port: int, least: int = 0) -> None:
    if not least <= port <= 65535:
        raise ValueError(f"{what} must be from {least} to 65535, not {port}")
