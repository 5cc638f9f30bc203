"""Multi-head latent attention: the pool has one row per token and layer, from which the K and V of all heads follow.

A row is the latent c of a token, which its layer has compressed and normalised, and a key k' with the rotary embedding, which
all heads share. `kv_b_proj` has matrices W_k and W_v of each head, with which

    k = [W_k·c, k']        v = W_v·c        q·k = [W_kᵀ·q, q']·[c, k']        Σ p·v = W_v·(Σ p·c)

So all heads attend over one head whose K and V are the rows: W_k is applied to the query, W_v to the result. The kernels are
those of other models. Prompts are computed like this, too, although expanding K and V would take less arithmetic: so a token
has the same bits in both phases.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
Shape legend: T tokens, H heads, R numbers of a latent, P of a rotated key, N of the other part of a query, V of a value.
"""

from typing import Any

import torch

from pdserve.engine.architectures.adapters import Source
from pdserve.engine.cpu_fusion.tolerance import FUSED_DTYPES
from pdserve.engine.kv_probe import UnsupportedAttention
from pdserve.kernels import linear

_TEST_ROWS = 3


class Absorbed(torch.nn.Module):
    """`kv_b_proj` of one layer, applied to queries and to results of attention.

    Args:
        weight_FR: weight of `kv_b_proj`, of which each head has N + V rows.
        nope_size: N.
        value_size: V.
    """

    def __init__(self, weight_FR: torch.Tensor, nope_size: int, value_size: int) -> None:
        super().__init__()
        weight_HFR = weight_FR.view(-1, nope_size + value_size, weight_FR.shape[1])
        k_HNR, v_HVR = weight_HFR.split([nope_size, value_size], 1)
        self.k_HNR = torch.nn.Parameter(k_HNR.contiguous(), requires_grad=False)
        self.v_HRV = torch.nn.Parameter(v_HVR.transpose(1, 2).contiguous(), requires_grad=False)

    def rows(self, c_11TR: torch.Tensor, k_11TP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, [1, 1, T, R + P], as K and as V. Takes the place of transformers' `expand_kv`."""
        rows = torch.cat((c_11TR, k_11TP), -1)
        return rows, rows

    def queries(self, q_1HTD: torch.Tensor) -> torch.Tensor:
        """[1, H, T, N + P] → [1, H, T, R + P]"""
        nope_size = self.k_HNR.shape[1]
        nope_HTN, rotated_HTP = q_1HTD[0, ..., :nope_size], q_1HTD[0, ..., nope_size:]
        return torch.cat((torch.bmm(nope_HTN, self.k_HNR), rotated_HTP), -1)[None]

    def values(self, y_1THD: torch.Tensor) -> torch.Tensor:
        """[1, T, H, R + P], sums of rows → [1, T, H, V]"""
        y_HTR = y_1THD[0, ..., : self.v_HRV.shape[1]].transpose(0, 1)
        return torch.bmm(y_HTR, self.v_HRV).transpose(0, 1)[None]

    def pack(self) -> None:
        """Replace 16-bit matrices by packed ones, with which `torch.bmm` gives a row the same bits in any batch."""
        for name, weight in list(self.named_parameters()):
            if weight.dtype in FUSED_DTYPES:
                delattr(self, name)
                setattr(self, name, linear.pack(weight.data, transposed=True))

    def equals(self, expand_kv: Any, rotated_size: int) -> bool:
        """Return whether `expand_kv` of a layer computes what is absorbed."""
        random = torch.Generator().manual_seed(0)
        latent_size = self.k_HNR.shape[2]
        row = torch.randn((1, 1, _TEST_ROWS, latent_size + rotated_size), generator=random).to(self.k_HNR)
        c_11TR, k_11TP = row.split([latent_size, rotated_size], -1)
        k, v = expand_kv(c_11TR, k_11TP)
        heads = len(self.k_HNR)
        expected_k = torch.cat((c_11TR @ self.k_HNR.transpose(1, 2), k_11TP.expand(-1, heads, -1, -1)), -1)
        pairs, eps = ((k, expected_k), (v, c_11TR @ self.v_HRV)), 4 * torch.finfo(row.dtype).eps
        return all(x.shape == y.shape and bool((x - y).abs().max() <= eps * y.abs().max()) for x, y in pairs)


@torch.inference_mode()
def adapt(model: torch.nn.Module, source: Source) -> None:
    """Replace in place the `kv_b_proj` of a model's latent attention: a `pdserve.architectures` adapter.

    Its attention layers then show one latent row of R + P numbers.

    Raises:
        UnsupportedAttention: its latents are expanded in another way.
    """
    for module in list(model.modules()):
        layer: Any = module
        if not hasattr(module, "expand_kv"):
            continue
        if hasattr(module, "indexer"):
            raise UnsupportedAttention("layers that select the tokens to which they attend")
        if type(layer.kv_b_proj) is not torch.nn.Linear or layer.kv_b_proj.bias is not None:
            raise UnsupportedAttention("latents whose expansion is quantized or has a bias")
        absorbed = Absorbed(layer.kv_b_proj.weight.data, layer.qk_nope_head_dim, layer.v_head_dim)
        if not absorbed.equals(layer.expand_kv, layer.qk_rope_head_dim):
            raise UnsupportedAttention("latents that expand to other keys and values than those of DeepSeek-V2")
        layer.kv_b_proj, layer.absorbed, layer.expand_kv = None, absorbed, absorbed.rows
