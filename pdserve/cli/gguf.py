"""`pdserve convert-gguf`: writes a GGUF file as a checkpoint directory, its weights in Q4_0 and Q8_0 code by code.

Sources: GGUF and its blocks as in llama.cpp's gguf-py; configuration, tokenizer and names of tensors by transformers, whose
dequantized model is the reference. Q4_0 and Q8_0 share a float16 scale d among 32 weights of a row, (code - 8) · d or
code · d, which is what compressed-tensors says with groups of 32. Scales become float32, in which these products are exact.
"""

import importlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import track
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from pdserve.errors import SetupError, install, reason

GROUP = 32  # weights of a block
CODED_BITS = {"Q4_0": 4, "Q8_0": 8}
EXPERTS = re.compile(r"ffn_(gate|up|down)_exps\.weight$")
ARCHITECTURE, ROPE_FACTORS = "general.architecture", "rope_freqs.weight"
SIZES = {  # which transformers does not read, by the field in GGUF
    "head_dim": "attention.key_length",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROW_PRESERVING = ("TensorProcessor", "LlamaTensorProcessor", "Qwen2MoeTensorProcessor", "Gemma2TensorProcessor")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # which say more than GGUF does
SHARD_BYTES = 4 << 30
FAULTS = (
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
)  # of gguf and transformers, in a bad file
Tensors = dict[str, torch.Tensor]


def convert(source: Path, target: Path) -> str:
    """Write the model of a GGUF file to a new directory, and return what it has become, in a sentence.

    Raises:
        SetupError: the file is no GGUF, of a model that is not supported, or the directory is not empty.
    """
    try:
        import gguf
    except ImportError as error:
        raise SetupError(f"convert-gguf needs the package gguf: {install('gguf')}") from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SetupError(f"{target} is there already; name a new directory")
    try:
        reader = gguf.GGUFReader(source)
        beside = [source.with_name(name) for name in TOKENIZER_FILES if source.with_name(name).is_file()]
        where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        tokenizer = None if beside else AutoTokenizer.from_pretrained(**where)
        config = _config(reader, where)
        model = _Model(config, reader)
    except OSError as error:
        raise SetupError(f"{source} cannot be read: {reason(error)}") from error
    except FAULTS as error:
        raise SetupError(f"{source} cannot be converted: {error}") from error
    kinds = Counter[str]()  # bytes of the weights of linear layers
    for tensor in reader.tensors:
        if model.is_linear(tensor.name):
            kinds[tensor.tensor_type.name] += tensor.n_bytes
    bits = 4 if kinds["Q4_0"] > kinds["Q8_0"] else 8
    try:
        target.mkdir(parents=True, exist_ok=True)
        coded = _write_weights(reader.tensors, model, bits, target)
        _write_config(config, reader, bits if coded else None, target)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        for file in beside:
            shutil.copy(file, target)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise SetupError(f"{target} cannot be written: {reason(error)}") from error
        raise
    dense = ", ".join(sorted(kinds.keys() - set(coded))) or "none"
    return f"{target}: {sum(coded.values())} linear layers in {bits} bits; types of layers that became dense: {dense}"


def _config(reader: Any, where: dict[str, Any]) -> Any:
    """Return the configuration: that of the original model if it lies beside the file, or else the file's."""
    if Path(where["pretrained_model_name_or_path"], "config.json").is_file():
        return AutoConfig.from_pretrained(where["pretrained_model_name_or_path"])
    architecture = reader.get_field(ARCHITECTURE).contents()
    scaling = reader.get_field(f"{architecture}.rope.scaling.type")
    scales = scaling is not None and scaling.contents() != "none"
    if scales or any(tensor.name == ROPE_FACTORS for tensor in reader.tensors):
        raise ValueError("it scales rotary positions in its own way; put the original model's config.json beside it")
    config = AutoConfig.from_pretrained(**where)
    for name, field in SIZES.items():
        found = reader.get_field(f"{architecture}.{field}")
        if hasattr(config, name) and found is not None:
            setattr(config, name, int(found.contents()))
    return config


class _Model:
    """Names and shapes of a model's tensors in transformers, and the order of their rows, which llama.cpp changes.

    Raises:
        ValueError: the file has other tensors than the model, or one whose rows llama.cpp has mixed.
    """

    def __init__(self, config: Any, reader: Any) -> None:
        of_transformers: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

        if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
            raise ValueError(f"it is one of {parts.contents()} parts; put them together by `llama-gguf-split --merge`")
        architecture = reader.get_field(ARCHITECTURE).contents()
        model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        processor = of_transformers.TENSOR_PROCESSORS.get(architecture, of_transformers.TensorProcessor)
        if model_class is None or processor.__name__ not in ROW_PRESERVING:
            raise ValueError(f"models of {architecture} are not supported")
        config.architectures = [model_class.__name__]
        with torch.device("meta"):
            model = model_class(config)
        self._processor = processor(config=config.to_dict())
        self._names: dict[str, str] = of_transformers.get_gguf_hf_weights_map(model, self._processor)
        self._linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
        known = {tensor.name: self.name(tensor.name) for tensor in reader.tensors if tensor.name != ROPE_FACTORS}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        needed = shapes.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else ())
        if unknown := sorted(name for name, found in known.items() if found is None):
            raise ValueError(f"{model_class.__name__} has no {unknown[0]}")
        if missing := sorted(needed - set(known.values())):
            raise ValueError(f"{missing[0]} of {model_class.__name__} is missing")
        for tensor in reader.tensors:
            stored = tuple(map(int, reversed(tensor.shape)))
            if (name := known.get(tensor.name)) in self._linear and stored != shapes[name]:
                raise ValueError(f"{tensor.name} is {stored}, and in {model_class.__name__} {shapes[name]}")

    def name(self, name: str) -> str | None:
        """Return the name of a tensor in the model; None: the model does without it. Of experts, that of all."""
        return self._names.get(name) or self._names.get(name.removesuffix(".weight"))

    def is_linear(self, name: str) -> bool:
        return self.name(name) in self._linear or EXPERTS.search(name) is not None

    def restore(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the rows of a tensor as the model has them."""
        if EXPERTS.search(name):
            return rows
        restored: np.ndarray = self._processor.process(rows, name).weights
        return restored


def _write_weights(tensors: list[Any], model: _Model, bits: int, target: Path) -> Counter[str]:
    """Write all tensors, in files of limited size. Returns how many layers have codes, by their type in GGUF."""
    coded, shard, files = Counter[str](), Tensors(), dict[str, str]()
    size = 0

    def flush() -> None:
        nonlocal size
        file = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, target / file, {"format": "pt"})
        (target / file).chmod(0o644)  # as the others: it may be served by another user
        files.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for tensor in track(tensors, "converting"):
        if (name := model.name(tensor.name)) is None:
            continue
        kind = tensor.tensor_type.name
        is_coded = model.is_linear(tensor.name) and CODED_BITS.get(kind, 9) <= bits
        for part, rows in _parts(tensor, name):
            if is_coded:
                shard |= _codes(part, model.restore(tensor.name, rows), kind, bits)
                coded[kind] += 1
            else:
                shard[part] = _dense(model.restore(tensor.name, _values(rows, tensor)), kind)
        size = sum(one.nbytes for one in shard.values())
        if size > SHARD_BYTES:
            flush()
    flush()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return coded


def _parts(tensor: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights of each expert, or the whole tensor: name, and rows as they are stored."""
    found = EXPERTS.search(tensor.name)
    if found is None:
        yield name, tensor.data
        return
    for expert, rows in enumerate(tensor.data):
        yield f"{name.rpartition('.')[0]}.{expert}.{found[1]}_proj.weight", rows


def _values(rows: np.ndarray, tensor: Any) -> np.ndarray:
    import gguf

    values: np.ndarray = gguf.dequantize(rows, tensor.tensor_type)
    return values


def _dense(values: np.ndarray, kind: str) -> torch.Tensor:
    """Return float32 where that is exact, and bfloat16 for types that have no codes here, whose files would be large."""
    tensor = torch.from_numpy(np.array(values))
    return tensor if kind in ("F32", "F16", *CODED_BITS) else tensor.bfloat16()


def _codes(name: str, rows: np.ndarray, kind: str, bits: int) -> Tensors:
    """Return the tensors of a layer in compressed-tensors' words.

    Args:
        rows: [N, bytes] of blocks: d in float16, then codes: 32 int8, or 16 bytes whose low halves come first.
    """
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 2 + GROUP * CODED_BITS[kind] // 8)
    scales, stored = blocks[..., :2].copy().view(np.float16)[..., 0], blocks[..., 2:]
    if kind == "Q4_0":
        codes = np.concatenate([stored & 15, stored >> 4], -1).reshape(len(rows), -1)
    else:
        codes = stored.copy().view(np.int8).reshape(len(rows), -1)
    layer = name.removesuffix(".weight")
    tensors = {f"{layer}.weight_scale": torch.from_numpy(scales.astype(np.float32))}
    if bits == 4:
        words = (codes[:, ::2] | codes[:, 1::2] << 4).view("<i4")
        shape = torch.tensor(codes.shape)
        return tensors | {f"{layer}.weight_packed": torch.from_numpy(words), f"{layer}.weight_shape": shape}
    if kind == "Q4_0":
        codes = codes.astype(np.int8) - 8
    return tensors | {f"{layer}.weight": torch.from_numpy(codes)}


def _write_config(config: Any, reader: Any, bits: int | None, target: Path) -> None:
    """Write config.json and generation_config.json.

    Args:
        bits: of the coded layers; None: there are none.
    """
    config.dtype = "bfloat16"
    config.save_pretrained(target)
    settings = {key: value for key, value in json.loads((target / "config.json").read_text()).items() if key[0] != "_"}
    names = [f"tokenizer.ggml.{part}_token_id" for part in ("eos", "eot", "eom")]
    ends = {int(field.contents()) for name in names if (field := reader.get_field(name)) is not None}
    if bits is not None:
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        settings["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if bits == 4 else "naive-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }
    (target / "config.json").write_text(json.dumps(settings, indent=2))
    if ends:
        GenerationConfig(eos_token_id=sorted(ends)).save_pretrained(target)
