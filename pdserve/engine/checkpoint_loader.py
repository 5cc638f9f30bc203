"""Loading of checkpoints: any decoder that transformers supports, with paged attention and fused CPU layers in place."""

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.quantization_config import Mxfp4Config

from pdserve.config import EngineConfig
from pdserve.engine import paged_model
from pdserve.engine.architectures import adapters, chunked_attention
from pdserve.engine.architectures.class_head import num_labels
from pdserve.engine.checkpoint import Checkpoint
from pdserve.engine.cpu_fusion import experts
from pdserve.engine.cpu_fusion.fused_layers import fuse_mlps, fuse_norms, fuse_rotary
from pdserve.engine.cpu_fusion.linear_method import prepack
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.engine.kv_probe import UnsupportedAttention, probe
from pdserve.engine.parallel.rank_group import RankGroup
from pdserve.engine.parallel.shard import Shard
from pdserve.engine.without_compiler import without_compiler
from pdserve.errors import SetupError
from pdserve.kernels import memory, native
from pdserve.kernels.attention import fused_layers, is_batch_invariant
from pdserve.kernels.reference import SCALE_BYTES
from pdserve.kv_spec import KVSpec
from pdserve.model_path import check_checkpoint, resolve_model
from pdserve.plugins import extension
from pdserve.pooling import read_pooling

log = logging.getLogger(__name__)

MIN_FP8_CAPABILITY = (8, 9)
NO_INTERFACE = "its attention does not go through transformers' attention interface"
LOW_BIT_METHODS = ("awq", "gptq", "compressed-tensors", "fp8")  # the last on CPUs only
Kept = Literal["dense", "rounded", "codes", "fp8"]  # rounded at load, codes of the checkpoint
MESSAGE_ENDS = frozenset({"<|end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"})
DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def load(config: EngineConfig, group: RankGroup | None = None) -> Checkpoint:
    """Load `config.model`, a local directory or a hub id, onto its device.

    Args:
        group: the ranks among which the model is divided.

    Raises:
        SetupError: the model or the device does not exist, or the architecture is not supported.
    """
    path = _local_directory(config.model)
    device = find_device(config.device)
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images of torch let cuBLAS round float32 to TF32
    hf_config = _hf_config(path)
    dtype = _dtype(config.dtype, hf_config)
    text_config = hf_config.get_text_config()
    with without_compiler():
        model, spec = _load_model(path, hf_config, dtype, device, config, group)
    kv_dtype = dtype
    if config.kv_cache_dtype == "int8":
        if any(kv.latent for kv in spec.groups):
            raise SetupError("--kv-cache-dtype int8: not for models with latent KV, whose rows are small already")
        if dtype not in FUSED_DTYPES:  # whose products may differ by the batch in the last bit, and so in an integer
            raise SetupError("--kv-cache-dtype int8 needs --dtype bfloat16 or float16")
        spec, kv_dtype = spec.in_bytes(SCALE_BYTES), torch.int8
    layout = spec.layout(
        model_fingerprint=fingerprint(path, config.quantization),
        block_size=config.block_size,
        dtype=str(kv_dtype).removeprefix("torch."),
        itemsize=kv_dtype.itemsize,
        rank=group.rank if group else 0,
        ranks=group.ranks if group else 1,
    )
    return Checkpoint(
        model=model,
        layout=layout,
        spec=spec,
        context_length=_context_length(text_config),
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(path, text_config),
        device=device,
        dtype=dtype,
        group=group,
        pooling=read_pooling(path, config.pooling, num_labels(hf_config)),
        hidden_size=text_config.hidden_size,
        message_ends=_message_ends(path),
    )


def find_shard(config: EngineConfig, group: RankGroup) -> Shard:
    """Return how the layers of a checkpoint that is loaded already are sliced."""
    path = _local_directory(config.model)
    return Shard(path, _hf_config(path), group)


def _context_length(text_config: Any) -> int:
    """Return the context of the model, limited to the first chunk of chunked attention and to longrope's original positions.

    Once one position in a step exceeds these, longrope changes the embeddings of the whole step: tokens would depend on the
    other sequences in the batch and on the chunking of the prompt.
    """
    context: int = text_config.max_position_embeddings
    ropes = getattr(text_config, "rope_parameters", None) or {}
    for rope in (ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))):
        if rope.get("rope_type") == "longrope" and (original := rope["original_max_position_embeddings"]) < context:
            log.warning("the context is %d of the model's %d: longrope beyond it is not supported", original, context)
            context = original
    if (chunk := chunked_attention.first_chunk(text_config) or context) < context:
        log.warning("the context is %d of the model's %d: chunked attention beyond it is not supported", chunk, context)
        context = chunk
    return context


def fingerprint(path: Path, quantization: str = "none") -> str:
    """Return a digest of config.json, all weights and what these are rounded to.

    Instances with different digests never exchange KV.
    """
    # An earlier version rounded to the same codes with other scales.
    digest = xxhash.xxh3_128(b"" if quantization == "none" else f"{quantization} by exact products".encode())
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _local_directory(name: str) -> Path:
    resolved = resolve_model(name)
    if isinstance(resolved, Path):
        path = resolved
    else:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(resolved, allow_patterns=DOWNLOAD_PATTERNS))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise SetupError(
                f"model {name!r} is not a local directory, and the hub download failed: {reason}"
            ) from error
    check_checkpoint(path)
    return path


def find_device(name: str) -> torch.device:
    cuda = torch.cuda.is_available()
    device = torch.device(("cuda" if cuda else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not cuda:
        raise SetupError(f"device {name!r} requested, but torch {torch.__version__} finds no GPU; use --device cpu")
    return device


def _dtype(name: str, hf_config: Any) -> torch.dtype:
    if name == "auto":
        dtype = getattr(hf_config.get_text_config(), "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _hf_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError) as error:
        raise SetupError(f"{path}/config.json: {str(error).strip().splitlines()[0]}") from error


def _unsupported(hf_config: Any) -> str:
    architecture = (hf_config.architectures or [hf_config.model_type])[0]
    return f"architecture {architecture} is not supported"


def _model_class(hf_config: Any) -> Any:
    """Return the class of a model in transformers. Whether hybrids use the attention interface, only their layers show."""
    unsupported = _unsupported(hf_config)
    if type(hf_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SetupError(f"{unsupported}: transformers {transformers.__version__} has no causal language model for it")
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if not (model_class._supports_attention_backend or model_class._is_stateful):
        raise SetupError(f"{unsupported}: {NO_INTERFACE}")
    return model_class


def _load_model(
    path: Path,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    group: RankGroup | None,
) -> tuple[torch.nn.Module, KVSpec]:
    """Return the model, and what its KV is."""
    paged_model.register()
    experts.register()
    transformers.utils.logging.disable_progress_bar()
    unsupported, model_class = _unsupported(hf_config), _model_class(hf_config)
    invariant = is_batch_invariant(config.batch_invariant, device)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": paged_model.NAME, "use_safetensors": True}
    if dtype in FUSED_DTYPES and (device.type == "cpu" or invariant):
        # By default, transformers computes experts as grouped products, which round rows otherwise in other batches.
        options["experts_implementation"] = experts.NAME
    if group is not None and (num_labels(hf_config) or config.pooling == "yes-no"):
        raise SetupError("classifiers are not divided among ranks: leave out --tensor-parallel-size")
    if _quantization(hf_config) == "mxfp4":
        log.info("weights in MXFP4 are computed in %s, and take as much memory", str(dtype).removeprefix("torch."))
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    kept = _kept_quantized(hf_config, config.quantization, device, invariant)
    if kept == "fp8":
        options["device_map"] = {"": device}  # where its layers pack the weights
    if group is not None and kept != "dense":
        raise SetupError("quantized weights are not divided among ranks: leave out --tensor-parallel-size")
    kv_heads, num_layers = None, hf_config.get_text_config().num_hidden_layers
    try:
        if group is not None:
            shard = Shard(path, hf_config, group)
            model, kv_heads = shard.load(**options), shard.kv_heads
        elif kept == "codes":
            settings, packs = _quantization_settings(hf_config), _packs(config, device, dtype)
            model = extension("low-bit-checkpoints").load(
                model_class, path, hf_config, settings, packs=packs, **options
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
    except ValueError as error:
        raise SetupError(f"{unsupported}: {str(error).strip().splitlines()[0]}") from error
    loaded: torch.nn.Module = model.eval()
    if kept == "rounded":
        extension("low-bit-rounding").round_weights(loaded, config.quantization)
    if kept != "fp8":
        loaded = loaded.to(device)
    try:
        spec = adapters.adapt(loaded, adapters.Source(path, hf_config, config.pooling))
        loaded.requires_grad_(False)
        spec = spec or probe(loaded, num_layers, kv_heads)
    except UnsupportedAttention as error:
        raise SetupError(f"{unsupported}: {error}") from error
    if not (model_class._supports_attention_backend or spec.states):  # hybrids do not say so
        raise SetupError(f"{unsupported}: {NO_INTERFACE}")
    if spec.num_layers != num_layers:
        raise SetupError(f"{unsupported}: its adapter states the KV of {spec.num_layers} of {num_layers} layers")
    if group is not None and len(spec.sections) > 1:
        raise SetupError(f"{unsupported} with --tensor-parallel-size: its layers have KV of different shapes")
    match fused_layers(config.kernel, device):
        case "cpu" | "packed" as kind:
            _fuse_for_cpu(loaded, fuse=kind == "cpu")
        case "gpu":
            extension("gpu").fuse(loaded)
    return loaded, spec


def _quantization(hf_config: Any) -> str | None:
    """Return the name of the method by which the weights of a checkpoint are quantized; None: they are not."""
    if not (settings := _quantization_settings(hf_config)):
        return None
    method = settings.get("quant_method")
    return str(getattr(method, "value", method))


def _is_low_bit(method: str | None, device: torch.device) -> bool:
    """Return whether we read the weights of a method ourselves."""
    return method in LOW_BIT_METHODS and (method != "fp8" or device.type == "cpu")


def _quantization_settings(hf_config: Any) -> dict[str, Any]:
    settings = getattr(hf_config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else dict(settings.to_dict())


def _kept_quantized(hf_config: Any, rounding: str, device: torch.device, invariant: bool) -> Kept:
    """Return how weights are kept, where transformers, the kernels and the device support that.

    Args:
        rounding: --quantization.

    Raises:
        SetupError: the weights are quantized in another way, not for this device, or would be rounded once more.
    """
    method = _quantization(hf_config)
    if method in (None, "mxfp4"):  # the latter are unpacked while they are loaded
        return "dense" if rounding == "none" else "rounded"
    if not (is_low_bit := _is_low_bit(method, device)):
        _check_fp8(method, device, invariant)
    if rounding != "none":
        raise SetupError(f"--quantization {rounding}: the weights are quantized already; leave it out")
    return "codes" if is_low_bit else "fp8"


def _check_fp8(method: str | None, device: torch.device, invariant: bool) -> None:
    """Raise SetupError if a method is not FP8, or a device cannot compute with such weights."""
    if method != "fp8":
        raise SetupError(
            f"weights quantized by {method} are not supported; use AWQ, GPTQ, compressed-tensors, FP8, MXFP4 or plain weights"
        )
    if (capability := torch.cuda.get_device_capability(device)) < MIN_FP8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (MIN_FP8_CAPABILITY, capability))
        raise SetupError(
            f"FP8 weights need a GPU of compute capability {needed}, and this one has {found}; use the unquantized checkpoint"
        )
    if invariant:
        raise SetupError("--batch-invariant on: not with FP8 weights, whose products are not ours")
    if importlib.util.find_spec("accelerate") is None:
        raise SetupError("FP8 weights need the package accelerate: pip install accelerate")


def _packs(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear layers will be packed for the kernels of CPUs."""
    return dtype in FUSED_DTYPES and fused_layers(config.kernel, device) == "cpu" and native.is_available()


def _fuse_for_cpu(model: torch.nn.Module, *, fuse: bool) -> None:
    """With `fuse`, replace layers in place by those of the C++ kernels, where these can be built."""
    if fuse and native.is_available():
        prepack(model)
        for module in model.modules():
            if isinstance(module, adapters.Packs):
                module.pack()
        experts.pack_experts(model)
        fuse_norms(model)
        fuse_rotary(model)
        fuse_mlps(model)
    for parameter in model.parameters():  # each step reads them all: fewer page walks save a tenth of its time
        memory.huge_pages(parameter.data, written=True)


def _eos_token_ids(path: Path, text_config: Any) -> frozenset[int]:
    ids = text_config.eos_token_id
    if (path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def _message_ends(path: Path) -> frozenset[int]:
    """Return the tokens behind messages that may not be those that end generation: gpt-oss has others."""
    tokenizer, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    if tokenizer.is_file():
        added = {one["id"]: one["content"] for one in json.loads(tokenizer.read_bytes()).get("added_tokens", ())}
    elif settings.is_file():
        listed = json.loads(settings.read_bytes()).get("added_tokens_decoder", {})
        added = {int(token): one["content"] for token, one in listed.items()}
    else:
        added = {}
    return frozenset(token for token, content in added.items() if content in MESSAGE_ENDS)


def cpu_memory_available() -> int:
    """Return the bytes that this process may still allocate: the minimum of the machine's and its container's."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        cache = int(stat.get("inactive_file", 0))  # counted as used, reclaimed on demand
        available = min(available, int(limit.read_text()) - int(used.read_text()) + cache)
    return max(available, 0)
