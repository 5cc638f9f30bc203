"""Randomly initialised checkpoints for benchmarks: speed depends only on the shape, and nothing is downloaded."""

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|end|>", "<|pad|>")
BYTE_VOCABULARY = 256 + len(SPECIAL_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 checkpoint. The vocabulary is that of the byte tokenizer unless another size is given."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    vocabulary: int = BYTE_VOCABULARY
    dtype: str = "bfloat16"

    @property
    def weights(self) -> int:
        """Number of parameters of the layers' matrices, without the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 * torch_dtype(self.dtype).itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step must read: every matrix once; the embedding is also the output matrix."""
        return (self.weights + self.vocabulary * self.hidden) * torch_dtype(self.dtype).itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * torch_dtype(self.dtype).itemsize

    def flops(self, tokens: int, kv_tokens: int, logits: int) -> float:
        """Return the operations of a forward pass: `tokens` new tokens, `kv_tokens` attended in sum, `logits` output rows."""
        attention = 4 * self.layers * self.heads * self.head_dim * kv_tokens
        return float(2 * self.weights * tokens + attention + 2 * self.hidden * self.vocabulary * logits)


QWEN3_0_6B = Shape(
    layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, context=40_960, vocabulary=151_936
)
QWEN3_8B = Shape(
    layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, context=40_960, vocabulary=151_936
)
# The KV of Qwen3-0.6B (1.75 MiB in a block of 16 tokens) with matrices that take a CPU almost no time.
WIDE_KV = Shape(layers=28, hidden=64, heads=8, kv_heads=8, head_dim=128, intermediate=64, context=16_384)
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, context=1024)


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def config_of(shape: Shape) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=BYTE_VOCABULARY - len(SPECIAL_TOKENS),
        pad_token_id=BYTE_VOCABULARY - 1,
    )


def make(shape: Shape, path: Path, seed: int = 0) -> Path:
    """Write the checkpoint and its tokenizer into `path`; transformers and pdserve can load it."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    dtype = torch_dtype(shape.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    model.save_pretrained(path)
    del model
    gc.collect()  # modules form reference cycles; their weights would distort memory measurements
    _save_byte_tokenizer(path)
    return path


def _save_byte_tokenizer(path: Path) -> None:
    """Save a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
