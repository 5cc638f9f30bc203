"""Recurrent layers: short convolutions (LFM2), Gated DeltaNet (Qwen3-Next, Qwen3.5), Kimi's delta attention, Mamba, Mamba-2.

transformers' mixers call functions of their module with the inputs of a convolution and of a recurrence, which come without a
cache from zero. An adapter lets each mixer call those of its own `Mixer` instead, which continue the states of a step's
sequences. What is before, between and behind stays transformers' code.

Recurrences are computed token by token in float32 (kernels/states.py), for prompts and answers alike: so they have the same
bits however a prompt is divided.

Sources: Gated DeltaNet (arXiv 2412.06464), Kimi Linear (2510.26692), Mamba (2312.00752), Mamba-2 (2405.21060).
Shape legend: see kernels/states.py; P numbers of a head, N of a state for each.
"""

import inspect
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from pdserve.engine.architectures.adapters import Source
from pdserve.engine.kv_probe import KVProbe
from pdserve.kernels import states
from pdserve.kernels.batch import PagedBatch

L2_EPSILON = 1e-6


@dataclass
class Step:
    """The batch that the model computes."""

    batch: PagedBatch | KVProbe | None = None

    def begin(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Take the batch from the arguments of the model, since not all of its layers pass them on: a hook."""
        self.batch = kwargs["paged"]


class Mixer:
    """The functions that one mixer calls in place of transformers'."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step = step
        self._layer = layer

    def bind(self, module: torch.nn.Module, function: FunctionType) -> MethodType:
        """Return `function`, the mixer's forward, as it calls these functions."""
        names = {**function.__globals__, **{name: method.__get__(self) for name, method in FUNCTIONS.items()}}
        code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
        return MethodType(FunctionType(code, names, function.__name__, defaults, closure), module)

    def convolve(
        self,
        x_1CT: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the convolution of each channel, [1, C, T]. In place of `causal_conv1d_fn`."""
        batch = self._step.batch
        assert batch is not None
        if isinstance(batch, KVProbe):
            batch.keep_state(self._layer, "convolution", weight[:, 1:].numel())
            return x_1CT
        y_TC = states.convolve(x_1CT[0].T, weight, bias, batch, self._layer).to(x_1CT.dtype)
        return (y_TC if activation is None else ACT2FN[activation](y_TC)).T[None]

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the gated delta rule's result, [1, T, H, V]. In place of `torch_chunk_gated_delta_rule` and Kimi's.

        Args:
            query, key: [1, T, G, K].
            value: [1, T, H, V].
            g: logarithms of the decay, [1, T, H] or [1, T, H, K].
            beta: [1, T, H].
        """
        q_TGK, k_TGK = query[0].float(), key[0].float()
        if use_qk_l2norm_in_kernel:
            q_TGK, k_TGK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON) for x in (q_TGK, k_TGK))
        scale = q_TGK.shape[-1] ** -0.5
        y_THV = self._attend(q_TGK * scale, k_TGK, value[0].float(), g[0].float().exp(), beta[0])
        return y_THV[None].to(query.dtype), None

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the scan of Mamba-2, float32 [1, T, H, P]. In place of `mamba2_chunk_scan`.

        Args:
            hidden_states: [1, T, H, P].
            dt: [1, T, H].
            A, D, dt_bias: [H].
            B, C: [1, T, G, N].
        """
        x_THP, dt_TH = hidden_states[0].float(), _step(dt[0], dt_bias, dt_softplus).clamp(*dt_limit)
        y_THP = self._attend(C[0].float(), B[0].float(), x_THP * dt_TH[..., None], (A.float() * dt_TH).exp())
        return (y_THP if D is None else y_THP + x_THP * D.float()[:, None])[None]

    def selective_scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the scan of Mamba, [1, C, T]. In place of `mamba_selective_scan`: each channel has a decay of its own.

        Args:
            hidden_states, dt, z: [1, C, T].
            A: [C, N].
            B, C: [1, N, T].
            D, delta_bias: [C].
        """
        x_TC, dt_TC = hidden_states[0].T.float(), _step(dt[0].T, delta_bias, delta_softplus)
        decay_T1NC = (A.float().T * dt_TC[:, None]).exp()[:, None]
        b_T1N, c_T1N = (x[0].T.float()[:, None] for x in (B, C))
        y_TC = self._attend(c_T1N, b_T1N, (x_TC * dt_TC)[:, None], decay_T1NC)[:, 0]
        y_TC = y_TC if D is None else y_TC + x_TC * D.float()
        return (y_TC if z is None else y_TC * F.silu(z[0].T.float())).T[None]

    def _attend(
        self,
        q_TGK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_THV: torch.Tensor,
        decay: torch.Tensor,
        beta_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = self._step.batch
        assert batch is not None
        if isinstance(batch, KVProbe):
            batch.keep_state(self._layer, "recurrence", k_TGK.shape[2] * v_THV[0].numel())
            return v_THV
        return states.linear_attention(q_TGK, k_TGK, v_THV, decay, beta_TH, batch, self._layer)


FUNCTIONS: dict[str, Any] = {
    "causal_conv1d_fn": Mixer.convolve,
    "torch_chunk_gated_delta_rule": Mixer.delta_rule,
    "chunk_kimi_delta_attention": Mixer.delta_rule,
    "mamba2_chunk_scan": Mixer.scan,
    "mamba_selective_scan": Mixer.selective_scan,
}


class TimeProjection(torch.nn.Module):
    """A linear layer whose weight Jamba multiplies itself: its rows have the bits of a layer's product, packed or not.

    Attributes:
        weight: what the mixer multiplies by columns, `weight @ x`.
        bias: that of the layer, which the mixer adds.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        self.layer = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        self.layer.weight = layer.weight

    @property
    def weight(self) -> "TimeProjection":
        return self

    def __matmul__(self, x_1CT: torch.Tensor) -> torch.Tensor:
        y_1TC: torch.Tensor = self.layer(x_1CT.transpose(1, 2))
        return y_1TC.transpose(1, 2)


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def adapt(model: torch.nn.Module, source: Source) -> None:
    """Let mixers in place continue the states of a step's sequences: an adapter."""
    step, has_mixers = Step(), False
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, FunctionType) and not FUNCTIONS.keys().isdisjoint(forward.__code__.co_names):
            layer, has_mixers = module.layer_idx, True
            assert isinstance(layer, int)
            setattr(module, "forward", Mixer(step, layer).bind(module, forward))  # noqa: B010, mypy takes it for a layer
            for convolution in module.children():
                if isinstance(convolution, torch.nn.Conv1d):
                    convolution.float()  # as the kernel reads it: else each call would make a copy
            projection = getattr(module, "dt_proj", None)
            if isinstance(projection, torch.nn.Linear) and projection.weight.dtype != torch.float32:
                module.dt_proj = TimeProjection(projection)
    if has_mixers:
        model.register_forward_pre_hook(step.begin, with_kwargs=True)
