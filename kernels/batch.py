"""Interface of paged attention kernels, and the flattened batch that they take: plain tensors, built once per step.

Shape legend, here and in the kernels:
    T  new tokens in the batch          N  blocks in the pool
    S  sequences                        B  tokens in a block
    H  query heads                      M  blocks of the longest sequence
    G  key/value heads                  L  layers (pool), tokens of KV (reference kernel)
    D  head size                        C  blocks to copy
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pdserve.kernels.states import DraftedRows, StateRows


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a kernel beyond attention over K and V of equal heads. The engine reads these, not the kernel's name.

    Attributes:
        latent: attends over latent rows, which are wider than heads.
        sinks: its `attend` takes attention sinks (`Scores.sinks_H`).
        byte_kv: takes KV in 8 bits, whose rows `reference.quantize` defines.
        states: states of recurrent layers are computed beside it.
        records_steps: its decode steps can be replayed without Python (`engine/step_graph.py`).
        is_capturable: its decode steps can be captured in a CUDA graph: nothing is read from the device.
        exact_rows: how a model beside it gets the same bits for a row in any batch: `products` pads the few products
            outside of packed layers, `functions` replaces torch's functions; empty: not at all.
        instructions: the instructions for which it was compiled, which decide how results are rounded; empty: its name does.
    """

    latent: bool = False
    sinks: bool = False
    byte_kv: bool = False
    states: bool = False
    records_steps: bool = False
    is_capturable: bool = False
    exact_rows: Literal["", "products", "functions"] = ""
    instructions: Callable[[], str] | None = None


class Scores(NamedTuple):
    """Parameters of a layer's attention scores.

    Attributes:
        scale: of the product of query and key.
        window: tokens that may be attended to, the token itself included; None: all before it.
        softcap: the score s becomes softcap · tanh(s / softcap); None: it does not.
        sinks_H: of each query head, the logit of an attention sink: it weighs like a token whose value is 0; float32.
            Only kernels that have the capability get any.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if scores are scaled products."""
        return self.softcap is None and self.sinks_H is None


class Kernel(Protocol):
    """One back end of paged attention: the modules `reference`, `cpu`, `gpu.triton_kernels`, and a class in `gpu.flash`.

    Other packages add theirs to the entry-point group `pdserve.kernels`: a function `load(device, batch_invariant)` that
    returns a kernel, or raises `KernelUnavailable` with the reason.
    """

    NAME: str
    CAPABILITIES: Capabilities

    def write_kv(
        self, cache_N2GBD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """Write the K and V of each new token into its slot of one layer's cache."""

    def attend(
        self, q_THD: torch.Tensor, cache_N2GBD: torch.Tensor, batch: "PagedBatch", scores: Scores
    ) -> torch.Tensor:
        """Return the attention of every new token over its own sequence, [T, H, D]."""

    def copy_blocks(self, pool_N: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
        """Copy whole blocks within the pool, for copy-on-write. Targets are distinct, and none of them is a source."""

    def gather_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, out_C: torch.Tensor) -> None:
        """out[i] = pool[blocks[i]], whole blocks."""

    def scatter_blocks(self, pool_N: torch.Tensor, blocks_C: torch.Tensor, values_C: torch.Tensor) -> None:
        """pool[blocks[i]] = values[i], whole blocks; the blocks are distinct."""


@dataclass(frozen=True)
class KVFormat:
    """The input of attention besides the queries."""

    dtype: torch.dtype
    head_dims: frozenset[int]  # of all layers
    block_size: int  # tokens
    sinks: bool = False  # some layer has attention sinks


def layer_caches(pool_NL2GBD: torch.Tensor) -> list[torch.Tensor]:
    """Return the cache [N, 2, G, B, D] of each layer of a pool whose layers have rows of one shape.

    Of latent rows, of which the pool has 1 instead of 2, K and V are the same memory.
    """
    return [cache.expand(-1, 2, -1, -1, -1) for cache in pool_NL2GBD.unbind(1)]


@dataclass(frozen=True)
class PagedBatch:
    """A flattened batch: the new tokens of each sequence, one sequence after the other.

    Attributes:
        caches: of each layer, a strided view of the pool [num_blocks, 2, num_kv_heads, block_size, head_dim], see
            `layer_caches`. Heads may differ between layers in number and size. KV in 8 bits has the rows of
            `reference.quantize`.
        slots_T: integers, destination of each new token's KV: block id × block size + offset; -1: nowhere (GPUs only).
        tables_SM: integers, block ids of each sequence in order; unused entries are 0, and those outside the attention
            window of every layer are void.
        query_lens: new tokens of each sequence.
        kv_lens: tokens of each sequence that have KV after this step, the new ones included.
        kv_lens_S: the same on the device, integers.
        starts: index of each sequence's first new token in the flattened batch, then T: integers [S + 1] on the device.
        kernel: the back end that all layers use.
        on_layer: is told of each layer that has written its KV, on CPUs; a replayed step tells it nothing.
        tails: the same batch in the blocks of each further group of layers, which differs in slots and tables.
        group_of: of each layer, its group: 0, whose slots and tables are in this batch, or 1 + an index of `tails`.
        states: of recurrent layers, whose tables are those of the last of `tails`; -1 there means that no state is kept.
        drafted: takes what recurrent layers read of rows that are drafts; None: there are none.

    The integers on the device are int64 for CPU kernels, and int32 on GPUs.
    """

    caches: Sequence[torch.Tensor]
    slots_T: torch.Tensor
    tables_SM: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    kv_lens_S: torch.Tensor
    starts: torch.Tensor
    kernel: Kernel
    on_layer: Callable[[int], None] | None = None
    tails: "tuple[PagedBatch, ...]" = ()
    group_of: Sequence[int] = ()
    states: "StateRows | None" = None
    drafted: "DraftedRows | None" = None

    def of_layer(self, layer: int) -> "PagedBatch":
        """Return the batch in the blocks of a layer's group."""
        at = self.group_of[layer]
        return self.tails[at - 1] if at else self

    @property
    def block_size(self) -> int:
        return self.caches[0].shape[3]

    @cached_property
    def plans(self) -> dict[object, Any]:
        """Plans that a kernel derives from the lengths once per step, for all layers, under its own keys."""
        return {}

    @cached_property
    def kv_starts(self) -> torch.Tensor:
        """Sums of the tokens with KV of the sequences before each, then of all: int32 [S + 1] on the device."""
        return torch.nn.functional.pad(self.kv_lens_S.cumsum(0), (1, 0)).int()

    @cached_property
    def num_decoding(self) -> int:
        """Number of sequences at the front with one new token. The scheduler puts decoding ones first."""
        return next((i for i, length in enumerate(self.query_lens) if length > 1), len(self.query_lens))

    @cached_property
    def phases(self) -> tuple["PagedBatch", "PagedBatch"]:
        """The decoding sequences at the front, and all others, as views of this batch; either may be empty."""
        count = self.num_decoding  # of sequences, and of their tokens
        parts = ((slice(None, count), self.starts[: count + 1]), (slice(count, None), self.starts[count:] - count))
        decoding, others = (
            replace(
                self,
                slots_T=self.slots_T[part],
                tables_SM=self.tables_SM[part],
                query_lens=self.query_lens[part],
                kv_lens=self.kv_lens[part],
                kv_lens_S=self.kv_lens_S[part],
                starts=starts,
            )
            for part, starts in parts
        )
        return decoding, others
