"""Settings of the commands that measure and plan: bench, simulate, plan, autoscale, which play a load, and profile."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from pdserve.config import (
    DEFAULT_PORT,
    LOCAL_PREFILL_HELP,
    POLICIES_GROUP,
    POLICY_NAMES,
    PORTS,
    TTFT_TARGET_HELP,
    TransferConfig,
    UpConfig,
    flag,
    parse_size,
    policy_flag,
)
from pdserve.settings import Settings
from pdserve.tools.roofline.devices import DEVICES, WEIGHTS

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "mooncake", "azure", "burstgpt")
TRACES = ("mooncake", "azure", "burstgpt")  # data sets with times of arrival
OF_TRACES = f"dataset_name={'|'.join(TRACES)}"
DAY_S = 86_400
RANDOM = ("input_len", "output_len", "range_ratio", "prefix_len")
PREFIX_REPETITION = ("prefix_len", "suffix_len", "num_prefixes", "output_len")
OF_GPUS = ("model", "weights", "tensor_parallel_size", "prefill_tensor_parallel_size", "decode_tensor_parallel_size")
ALL = "*"  # in place of an API key: those that are not named


def parse_acceptance(text: str) -> dict[str, float]:
    """Return the shares of right drafts by API key, of a text such as `0.7` or `edit=0.9,*=0.1`; empty: none.

    Raises:
        ValueError: the text has another form.
    """
    shares = dict[str, float]()
    for part in filter(None, text.split(",")):
        key, _, share = part.rpartition("=")
        try:
            shares[key.strip() or ALL] = float(share)
        except ValueError:
            shares[key] = -1.0
    if not all(0 <= share <= 1 for share in shares.values()):
        raise ValueError(f"{text!r} is not such as 0.7, or by API key edit=0.9,*=0.1, of shares from 0 to 1")
    return shares


@dataclass(frozen=True, kw_only=True)
class LoadConfig(Settings):
    GROUP: ClassVar = "Load"
    ONLY_WITH: ClassVar = {
        "dataset_path": (f"dataset_name=sharegpt|custom|{'|'.join(TRACES)}",),
        "burstiness": ("request_rate", "ramp_up_strategy", "slo_sweep"),
        "ramp_up_strategy": ("dataset_name=random|prefix_repetition|sharegpt|custom",),
        "ramp_up_start_rps": ("ramp_up_strategy",),
        "ramp_up_end_rps": ("ramp_up_strategy",),
        **dict.fromkeys([f"random_{one}" for one in RANDOM], ("dataset_name=random",)),
        **dict.fromkeys([f"prefix_repetition_{one}" for one in PREFIX_REPETITION], ("dataset_name=prefix_repetition",)),
        "output_len": ("dataset_name=sharegpt|custom",),
        "multi_turn": ("dataset_name=sharegpt|custom|mooncake",),
        "think_time": ("multi_turn",),
        "trace_speed": (OF_TRACES,),
        "trace_length_scale": (OF_TRACES,),
    }
    NOT_WITH: ClassVar = {"request_rate": ("ramp_up_strategy",), "trace_speed": ("request_rate",)}

    dataset_name: str = flag("data set", "random", choices=DATASETS)
    dataset_path: str = flag("file of the data set", "")
    num_prompts: int = flag("requests; of a file, at most", 1000, least=1)
    request_rate: float = flag(
        "mean requests per second; inf: all at once, or the trace's own times", math.inf, least=1e-6, infinite=True
    )
    burstiness: float = flag(
        "1: Poisson; less: bursts; more: more regular; inf: constant", 1.0, least=1e-6, infinite=True
    )
    ramp_up_strategy: str | None = flag(
        "how the rate changes over the run, in place of --request-rate; default: not",
        None,
        choices=("linear", "exponential"),
    )
    ramp_up_start_rps: float | None = flag("first rate of the ramp; no default", None, least=1e-6)
    ramp_up_end_rps: float | None = flag("last rate of the ramp; no default", None, least=1e-6)
    random_input_len: int = flag("random: prompt tokens after the prefix", 1024, least=1)
    random_output_len: int = flag("random: output tokens", 128, least=1)
    random_range_ratio: float = flag("random: lengths differ by up to this share of them", 0.0, least=0, most=1)
    random_prefix_len: int = flag("random: tokens of the prefix that all prompts share", 0, least=0)
    prefix_repetition_prefix_len: int = flag("prefix_repetition: tokens of a prefix", 256, least=1)
    prefix_repetition_suffix_len: int = flag("prefix_repetition: tokens after it", 256, least=1)
    prefix_repetition_num_prefixes: int = flag("prefix_repetition: number of prefixes", 10, least=1)
    prefix_repetition_output_len: int = flag("prefix_repetition: output tokens", 128, least=1)
    output_len: int | None = flag("sharegpt, custom: output tokens; default: those of the file", None, least=1)
    multi_turn: bool = flag("sharegpt, custom, mooncake: later turns wait for the answer to the previous one", False)
    think_time: float = flag("seconds between an answer and the next turn", 0.0, least=0, most=DAY_S)
    trace_speed: float = flag("mooncake, azure, burstgpt: 2 replays in half the time", 1.0, least=1e-6)
    trace_length_scale: float = flag("mooncake, azure, burstgpt: factor of all lengths", 1.0, above=0)
    warmup_requests: int = flag("first requests of the run that do not count, as they meet an empty fleet", 0, least=0)
    seed: int = flag("of lengths, prompts and arrivals", 0)


@dataclass(frozen=True, kw_only=True)
class FleetConfig(LoadConfig):
    GROUP: ClassVar = "Fleets"
    ONLY_WITH: ClassVar = {
        "speculative_tokens": ("acceptance",),
        "adapter_skew": ("adapters",),
        "max_loras": ("adapters",),
        "busy_threads": ("cores",),
    }
    NOT_WITH: ClassVar = {"profile": ("gpu",)}

    profile: str = flag("profile of the model on the machine, from `pdserve profile`", "profile.json")
    model: str = flag(
        "with --gpu: directory with a config.json, or name of a built-in shape; nothing is downloaded", ""
    )
    gpu: str | None = flag(
        "GPU whose data sheet gives the profile of --model; default: --profile", None, choices=tuple(DEVICES)
    )
    weights: str = flag("with --gpu: format of the weights", "bf16", choices=tuple(WEIGHTS))
    tensor_parallel_size: str = flag(
        "with --gpu: GPUs of an instance; auto: `pdserve plan` compares 1, 2, 4 and 8", "1"
    )
    prefill_tensor_parallel_size: int | None = flag("the same of prefill instances; default: as above", None, least=1)
    decode_tensor_parallel_size: int | None = flag("the same of decode instances; default: as above", None, least=1)
    connector: str = flag("scheme of a connector of the profile; empty: its first", "")
    num_blocks: int | None = flag("KV blocks per instance; default: as in the profile", None, least=2)
    block_size: int | None = flag(
        "tokens per KV block; default: as in the profile, or 512 for a mooncake trace, whose ids stand for as many",
        None,
        least=1,
    )
    max_num_seqs: int | None = flag(
        "maximum sequences in an instance's running batch; default: as in the profile", None, least=1
    )
    max_num_batched_tokens: int | None = flag(
        "maximum tokens per step of an instance; default: as in the profile", None, least=1
    )
    policy: str = flag("routing policy for P and D", "auto", choices=POLICY_NAMES, plugins=POLICIES_GROUP)
    prefill_policy: str | None = policy_flag("prefill")
    decode_policy: str | None = policy_flag("decode")
    local_prefill_tokens: int | None = flag(LOCAL_PREFILL_HELP, None, least=0)
    ttft_target_ms: float | None = flag(TTFT_TARGET_HELP, None, above=0)
    acceptance: str = flag(
        "share of drafts behind right ones that are right where instances speculate, such as 0.7, or by API key of the"
        " trace edit=0.9,*=0.1;"
        " empty: they do not",
        "",
    )
    speculate: str = flag(
        "where they get their drafts from: what is found, as much as pays (auto), or the draft model of the profile (draft)",
        "auto",
        choices=("auto", "draft"),
    )
    speculative_tokens: int | None = flag("as of an instance", UpConfig.speculative_tokens, least=0)
    adapters: int = flag(
        "adapters (LoRA) among which the requests are drawn, whose KV they do not share; 0: none", 0, least=0, most=1000
    )
    adapter_skew: float = flag(
        "the n-th adapter has requests in proportion to 1 / n to the power of this; 0: all alike", 1.0, least=0, most=10
    )
    max_loras: int = flag("most adapters in one step of an instance", UpConfig.max_loras, least=1)
    routers: int = flag("router processes", 1, least=1)
    cores: int | None = flag(
        "cores of a machine that instances, routers and client share; default: each has its own", None, least=1
    )
    busy_threads: float = flag(
        "threads of other programs that compute all the time on --cores", 0.0, least=0, most=10_000
    )
    store_size: str = flag("bytes of the KV store", "8GiB")
    stretch_prompts: float = flag("factor of all prompt lengths", 1.0, above=0)
    stretch_answers: float = flag("factor of all answer lengths", 1.0, above=0)
    chat: bool = flag("the requests are chats, whose generated KV is stored for the next turn", False)
    jobs: int | None = flag("processes that simulate; default: the number of cores", None, least=1)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a setting that can never work."""
        super().__post_init__()
        parse_size(self.store_size)
        if not parse_acceptance(self.acceptance) and self.speculate == "draft":
            raise ValueError("--speculate draft needs the share of its drafts that are right, such as --acceptance 0.7")
        if self.gpu and not self.model:
            raise ValueError("--gpu needs --model")
        if self.gpu and self.adapters:
            raise ValueError("--adapters need instances on CPUs: leave out --gpu, or them")
        gpus = self.tensor_parallel_size
        if gpus != "auto" and not (gpus.isdecimal() and int(gpus)):
            raise ValueError(f"--tensor-parallel-size must be a number from 1 on or auto, not {gpus}")
        for name in OF_GPUS if not self.gpu else ():
            if (value := getattr(self, name)) != getattr(FleetConfig, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} needs --gpu: a --profile is of the model and the ranks it was "
                    "measured with"
                )


@dataclass(frozen=True, kw_only=True)
class SloConfig(Settings):
    """Settings of commands that look for an SLO over many requests."""

    GROUP: ClassVar = "Targets"

    slo: str = flag("targets by percentile, such as ttft.p90=500ms,itl.p99=50ms", "")
    slo_file: str = flag("TOML file with targets, also by prompt length and API key; empty: none", "")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SloConfig, FleetConfig):
    GROUP: ClassVar = "Plan"
    NOT_WITH: ClassVar = {"max_instances": ("instances",)}

    instances: int | None = flag("find the best fleet of this size; default: the smallest that suffices", None, least=1)
    max_instances: int = flag("the largest fleet to try", 16, least=1)
    itl_target_ms: str = flag(
        "values of --itl-target-ms to compare, such as off,20; auto: off, and parts of the ITL target",
        "auto",
    )
    try_connector: str = flag("connectors of the profile to compare, such as shm,redis, or all; empty: --connector", "")
    try_policy: str = flag("values of --policy to compare, or all; empty: --policy", "")
    try_max_num_batched_tokens: str = flag(
        "values of --max-num-batched-tokens to compare, such as 512,2048; empty: --max-num-batched-tokens", ""
    )
    try_local_prefill_tokens: str = flag(
        "values of --local-prefill-tokens to compare, such as auto,0,256; empty: --local-prefill-tokens", ""
    )
    measured: str = flag(
        "results of `pdserve bench serve --save-result` to compare, by fleet, such as 1P+1D=a.json,2B=b.json; empty: none",
        "",
    )
    apply: str = flag(
        "folder for plan.env of Compose and plan-values.yaml of Helm, which start the fleet; empty: none", ""
    )
    price: float = flag("of one instance per hour, with --gpu of one GPU; 0: unknown", 0.0, least=0)
    json: str = flag("JSON file with all figures; empty: none", "")
    html: str = flag("HTML report in one file; empty: none", "")


@dataclass(frozen=True, kw_only=True)
class AutoscaleConfig(SloConfig, FleetConfig):
    GROUP: ClassVar = "Controller"
    ONLY_WITH: ClassVar = {
        **{one.name: ("simulate",) for one in fields(LoadConfig) if one.name != "seed"},
        **dict.fromkeys(("stretch_prompts", "stretch_answers", "prefill", "decode"), ("simulate",)),
        "max_instances": ("launcher", "simulate"),
        "ttft_target_ms": ("itl_target_ms",),
        **dict.fromkeys(("think_time", "warmup_requests", "chat", "cores", "busy_threads", "jobs"), ()),
        **dict.fromkeys(("prefill_tensor_parallel_size", "decode_tensor_parallel_size"), ()),
    }
    NOT_WITH: ClassVar = dict.fromkeys(("router", "apply", "launcher", "holder"), ("simulate",))

    router: str = flag(
        "URLs of all routers of the fleet, comma separated; dns://HOST:PORT stands for all addresses of a name",
        f"http://127.0.0.1:{DEFAULT_PORT}",
    )
    apply: bool = flag("make the changes; without it, they are only advised", False)
    interval: float = flag("seconds between decisions", 10.0, above=0, most=DAY_S)
    window: float = flag("seconds of past traffic that a forecast is made from", 120.0, above=0, most=DAY_S)
    horizon: float = flag("seconds that a forecast is for", 60.0, above=0, most=DAY_S)
    cooldown: float = flag("seconds after a change without another one", 30.0, least=0, most=DAY_S)
    start_timeout: float = flag(
        "seconds after which a change that has not come about is given up", 300.0, above=0, most=DAY_S
    )
    min_prefill: int = flag("prefill instances that always remain", 1, least=1)
    min_decode: int = flag("decode instances that always remain", 1, least=1)
    max_instances: int = flag(
        "instances altogether, up to which --launcher starts more; 0: only roles are changed", 0, least=0
    )
    launcher: str = flag(
        "where instances are started and ended, such as compose://?file=docker-compose.cpu.yml or kubernetes://NAMESPACE/RELEASE;"
        " empty: only roles are changed",
        "",
    )
    max_changes: int = flag("changes within an hour", 60, least=1)
    itl_target_ms: float | None = flag("the instances' --itl-target-ms; default: off", None, above=0)
    decisions: str = flag("file to which each decision is appended as a JSON line; empty: none", "")
    holder: str = flag(
        "name of this controller, of which one at a time may change a fleet; empty: host and process", ""
    )
    simulate: bool = flag(
        "try the controller out in a simulation of --prefill and --decode instances under a load", False
    )
    prefill: int = flag("prefill instances at the beginning of --simulate", 1, least=1)
    decode: int = flag("decode instances at the beginning of --simulate", 1, least=1)


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(FleetConfig):
    GROUP: ClassVar = "Simulation"
    ONLY_WITH: ClassVar = {"ttft_target_ms": ("itl_target_ms",)}

    prefill: str = flag("numbers of prefill instances, such as 1, 1..4 or 1,2,4", "1")
    decode: str = flag("numbers of decode instances", "1")
    both: str = flag("numbers of instances with the role both", "0")
    itl_target_ms: str = flag("values of the instances' --itl-target-ms, such as 30 or off,20,50", "off")
    goodput: str = flag(
        "SLO of a request, such as ttft=500ms,tpot=50ms,itl=50ms,e2el=5s, or vLLM's ttft:500; empty: none", ""
    )
    json: str = flag("JSON file with all figures; empty: none", "")
    csv: str = flag("CSV file with a row per request of the last fleet; empty: none", "")


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(LoadConfig):
    GROUP: ClassVar = "Benchmark"
    ONLY_WITH: ClassVar = {
        **dict.fromkeys(("save_detailed", "result_dir", "result_filename", "label"), ("save_result",)),
        **dict.fromkeys(("sweep_attainment", "sweep_tolerance", "sweep_repetitions"), ("slo_sweep",)),
    }
    NOT_WITH: ClassVar = {
        "host": ("base_url",),
        "port": ("base_url",),
        **dict.fromkeys(("ramp_up_strategy", "csv", "save_detailed"), ("slo_sweep",)),
    }

    base_url: str = flag("URL of the server; empty: from --host and --port", "")
    host: str = flag("host of the server", "127.0.0.1")
    port: int = flag("port of the server", DEFAULT_PORT, **PORTS)
    backend: str = flag("API: completions (openai) or chat (openai-chat)", "openai", choices=("openai", "openai-chat"))
    endpoint: str = flag("path of the API; empty: that of --backend", "")
    model: str = flag("name of the model; empty: the first of /v1/models", "")
    tokenizer: str = flag(
        "directory or hub id, for prompts of exact lengths; empty: the model's directory if it is on this machine,"
        " else common words",
        "",
    )
    api_key: str = flag("API key", "", secret=True, variable="OPENAI_API_KEY")
    temperature: float = flag("of sampling", 0.0, least=0)
    ignore_eos: bool = flag("ask for answers of full length; not every server can", False)
    extra_body: str = flag("JSON object of further fields of each request", "")
    num_warmups: int = flag("requests before the run, which do not count", 1, least=0)
    max_concurrency: int | None = flag("maximum requests in flight; default: unlimited", None, least=1)
    goodput: str = flag(
        "SLO of a request, such as ttft=500ms,tpot=50ms,itl=50ms,e2el=5s, or vLLM's ttft:500; empty: none", ""
    )
    percentile_metrics: str = flag("metrics to report", "ttft,tpot,itl,e2el")
    metric_percentiles: str = flag("percentiles to report", "50,90,99")
    slo_sweep: bool = flag("search the highest rates that meet --goodput, from --request-rate or 1", False)
    sweep_attainment: str = flag("percentages of requests that must meet it", "90,95,99")
    sweep_tolerance: float = flag("relative precision of the rates", 0.1, above=0)
    sweep_repetitions: int = flag("searches, for a confidence interval", 3, least=1)
    client_processes: int = flag("processes that send requests", 1, least=1)
    label: str = flag("begins the name of the result file; empty: the value of --backend", "")
    save_result: bool = flag("write the figures as JSON", False)
    save_detailed: bool = flag("with lists of the times, texts and errors of all requests", False)
    result_dir: str = flag("directory of the JSON file", ".")
    result_filename: str = flag("name of the JSON file; empty: from rate, model and time", "")
    csv: str = flag("CSV file with a row per request; empty: none", "")
    html: str = flag("HTML report in one file; empty: none", "")


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(UpConfig):
    GROUP: ClassVar = "Benchmark"
    ONLY_WITH: ClassVar = dict.fromkeys(("port", "on", "keys_file", "autoscale", "max_instances"), ())

    prefill: int = flag("prefill instances", 0, least=0)
    decode: int = flag("decode instances", 0, least=0)
    both: int = flag("instances with the role both", 1, least=0)
    input_len: int = flag("tokens of a prompt", 32, least=1)
    output_len: int = flag("tokens of an answer", 128, least=1)
    n: int = flag("answers to a prompt", 1, least=1)
    output_json: str = flag("JSON file of the figures; empty: none", "")


@dataclass(frozen=True, kw_only=True)
class BenchLatencyConfig(OfflineConfig):
    batch_size: int = flag("prompts of a batch", 8, least=1)
    num_iters_warmup: int = flag("batches that do not count", 10, least=0)
    num_iters: int = flag("batches that count", 30, least=1)


@dataclass(frozen=True, kw_only=True)
class BenchThroughputConfig(OfflineConfig):
    num_prompts: int = flag("prompts, all at once", 1000, least=1)


@dataclass(frozen=True, kw_only=True)
class BenchTuneConfig(SloConfig, UpConfig, LoadConfig):
    GROUP: ClassVar = "Benchmark"
    ONLY_WITH: ClassVar = {
        **dict.fromkeys(("port", "prefill", "decode", "both", "autoscale", "max_instances"), ()),
        "itl_target_ms": (),  # which --try-itl-target-ms names, and the best fleet has
    }
    NOT_WITH: ClassVar = {name: (f"try_{name}",) for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}

    seed: int = flag("of lengths, prompts and arrivals, and of sampling", 0)
    instances: int = flag("instances of a fleet, of which all splits are tried, and those of the role both", 2, least=1)
    try_itl_target_ms: str = flag("values of --itl-target-ms to compare, such as off,20", "off")
    try_max_num_seqs: str = flag("values of --max-num-seqs to compare, such as 16,64; empty: --max-num-seqs", "")
    try_max_num_batched_tokens: str = flag(
        "values of --max-num-batched-tokens to compare, such as 512,2048; empty: --max-num-batched-tokens", ""
    )
    try_block_size: str = flag("values of --block-size to compare, such as 16,64; empty: --block-size", "")
    budget: float = flag("seconds for forecasts and runs, those of earlier calls in --state included", 600.0, above=0)
    state: str = flag(
        "file of JSON lines to which each run is appended, and from which the next call goes on", "tune.jsonl"
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(TransferConfig):
    GROUP: ClassVar = "Profile"
    ONLY_WITH: ClassVar = {
        "force": ("compare", "paced"),
        "compare": ("from_fleet",),
        "import_file": ("import_source",),
        "import_entry": ("import_source",),
    }
    NOT_WITH: ClassVar = {
        "output": ("compare",),
        "from_fleet": ("import_source",),
        **{
            name: ("from_fleet", "import_source")  # which measure nothing
            for name in ("quick", "repeat", *(one.name for one in fields(TransferConfig)))
            if name != "force"
        },
    }

    output: str = flag("file of the profile", "profile.json")
    quick: bool = flag("fewer steps, and neither start-up nor role changes", False)
    repeat: int = flag("rounds over all steps, of which the medians count", 3, least=1)
    from_fleet: str = flag("URL of a router: take what its instances report, and measure nothing; empty: measure", "")
    compare: str = flag(
        "with --from-fleet: say whether the instance has drifted from this profile, and write none; empty: write one",
        "",
    )
    import_source: str | None = flag(
        "read published timings, and measure nothing; default: measure", None, choices=("distserve", "splitwise")
    )
    import_file: str = flag("file of --import-source", "")
    import_entry: str = flag("what of the file, such as facebook/opt-13b,1; empty: its only one", "")
