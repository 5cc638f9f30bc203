"""Profile of a model on GPUs by roofline: each part of a step takes as long as its bytes or its operations need, at the rates
that kernels reach. The constants are fitted to published timings, see benchmarks/README.md.
"""

from dataclasses import dataclass

from pdserve.engine.memory.groups import blocks_in
from pdserve.engine.memory.kv_memory import page_numbers, pool_groups
from pdserve.errors import SetupError
from pdserve.keys import Layout
from pdserve.kv_spec import STATE_BYTES
from pdserve.profile.profile import EngineFacts, Machine, Overheads, Profile, StepModel, TransferModel, groups_of
from pdserve.tools.roofline.devices import DEVICES, WEIGHTS, Device
from pdserve.tools.roofline.shape import Shape

FLOPS_REACH, FP8_REACH = 0.6, 0.5  # of the data sheet's operations, that products reach
ATTENTION_REACH = 0.35  # the same of attention in prefill
KV_REACH = 0.8  # of the memory's rate, that attention in decode reaches
LAYER_S = 2.5e-5  # around the products of a layer: norms, rotations, gaps between kernels
STEP_S = 4e-4  # of a step outside of its layers: sampling, inputs, the engine's thread
PEER_REACH = 0.6  # of the data sheet's rate between GPUs
SUMS = 2  # over the GPUs of an instance, in each layer
MEMORY_SHARE, ACTIVATIONS = 0.9, 3e9  # of a GPU's memory, that is used; bytes of it for activations and graphs
RDMA_BYTES_PER_S = 50e9 * 0.8  # of a GPU: a network card of 400 Gbit/s each
SHM_BYTES_PER_S, SHM_LATENCY_S = 6e9, 1e-3  # measured on an H200, per GPU
LATENCY_S = 1e-3  # of other transfers
BLOCK, BATCHES = 16, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_SEQS = 256
MEDIAN_ERROR, WORST_ERROR = 0.08, 0.31  # of the time, at the published points of benchmarks/roofline_points.csv


@dataclass(frozen=True)
class Estimate:
    """A model on some GPUs.

    Args:
        gpus: of an instance, among which each layer is divided.
        kv_size: bytes of a number of KV.
        context: tokens of a usual sequence, which matter where layers have windows.
    """

    shape: Shape
    gpu: str
    gpus: int = 1
    weights: str = "bf16"
    kv_size: float = 2.0
    context: float = 1024.0

    @property
    def _device(self) -> Device:
        return DEVICES[self.gpu]

    @property
    def _copies(self) -> float:
        """Number of an instance's GPUs that hold the same KV: all for latent rows, one for heads if there are enough."""
        heads = max(1, min(group.num_heads for group in self.shape.kv.groups))
        return max(1.0, self.gpus / heads)

    @property
    def _kv_bytes(self) -> float:
        """Of a token, of all GPUs without copies."""
        return self.shape.kv_numbers(self.context) * self.kv_size

    @property
    def layout(self) -> Layout:
        """The layout of blocks, which says the bytes of each group of layers."""
        return self.shape.kv.layout(
            model_fingerprint=self.shape.name, block_size=BLOCK, dtype="bfloat16", itemsize=round(self.kv_size)
        )

    @property
    def num_pages(self) -> int:
        """Pages of the pool that the memory has room for; at most 0 if the weights alone do not fit."""
        shape = self.shape
        vocabulary = 2 * shape.output  # whose matrices stay in 16 bits, as `products_s` reads them
        weights = (shape.parameters - vocabulary) * WEIGHTS[self.weights].size + vocabulary * WEIGHTS["bf16"].size
        weights /= self.gpus
        free = self._device.memory * MEMORY_SHARE - weights - ACTIVATIONS
        return int(free * self.gpus / (page_numbers(self.layout) * self.kv_size * self._copies))

    @property
    def kv_tokens(self) -> int:
        """Tokens of one sequence that the pool has room for."""
        return BLOCK * blocks_in(max(0, self.num_pages), pool_groups(self.layout, 0))

    @property
    def _state_s(self) -> float:
        """Seconds in which a step reads and writes the states of a sequence."""
        nbytes = sum(self.shape.kv.states.values()) * STATE_BYTES
        return 2 * nbytes / (self._device.bytes_per_s * KV_REACH * self.gpus)

    def products_s(self, tokens: int, rows: int) -> float:
        """Return the seconds of a step's products, with output for some rows, and of what surrounds them."""
        shape, device, form = self.shape, self._device, WEIGHTS[self.weights]
        flops = (
            device.fp8_flops * FP8_REACH
            if form.is_8_bit and device.fp8_flops > device.flops
            else device.flops * FLOPS_REACH
        )
        layers = max(
            shape.read(tokens) * form.size / (device.bytes_per_s * form.reach), 2 * shape.active * tokens / flops
        )
        bf16 = WEIGHTS["bf16"]
        output = max(
            shape.output * bf16.size / (device.bytes_per_s * bf16.reach),
            2 * shape.output * rows / (device.flops * FLOPS_REACH),
        )
        return (layers + output) / self.gpus + shape.layers * (LAYER_S + self._sum_s(tokens)) + STEP_S

    def _sum_s(self, tokens: int) -> float:
        """Return the seconds of a layer's sums over GPUs, of one row of 16 bits for each token."""
        if self.gpus == 1:
            return 0.0
        nbytes = 2 * (self.gpus - 1) / self.gpus * tokens * self.shape.hidden * 2
        return SUMS * (self._device.peer_latency_s + nbytes / (self._device.peer_bytes_per_s * PEER_REACH))

    @property
    def step(self) -> StepModel:
        """The model of a step."""
        device, shape = self._device, self.shape
        attended = shape.attended(self.context)
        by_bytes = self._kv_bytes * self._copies / (device.bytes_per_s * KV_REACH)
        by_flops = shape.context_flops * attended / (device.flops * FLOPS_REACH)
        return StepModel(
            decode=tuple((batch, self.products_s(batch, batch) + batch * self._state_s) for batch in BATCHES),
            context_s=max(by_bytes, by_flops) / self.gpus,
            prefill=tuple((tokens, self.products_s(tokens, 1)) for tokens in CHUNKS),
            pair_s=shape.pair_flops * attended / (device.flops * ATTENTION_REACH * self.gpus),
            cached_s=by_bytes / self.gpus,
            mixed=(-self.products_s(1, 1), 1.0, 1.0),  # weights are read once for both
        )

    @property
    def transfers(self) -> dict[str, TransferModel]:
        """Of KV between instances, by the way that it takes. Each GPU of an instance moves its part."""
        rates = {
            "rdma": (LATENCY_S, RDMA_BYTES_PER_S),
            "nvlink": (LATENCY_S, self._device.peer_bytes_per_s * PEER_REACH),
            "pcie": (LATENCY_S, self._device.host_bytes_per_s * PEER_REACH),
            "shm": (SHM_LATENCY_S, SHM_BYTES_PER_S),
        }
        return {
            name: TransferModel(latency, rate * self.gpus, latency, rate * self.gpus, 8 * rate * self.gpus)
            for name, (latency, rate) in rates.items()
        }

    def profile(self) -> Profile:
        """Return the profile of an instance.

        Raises:
            SetupError: the weights do not fit, or the heads cannot be divided.
        """
        if not self.shape.can_divide(self.gpus):
            raise SetupError(
                f"the {self.shape.heads} heads of {self.shape.name} cannot be divided among {self.gpus} GPUs: give another "
                "--tensor-parallel-size"
            )
        if (tokens := self.kv_tokens) < BLOCK * 2:
            name = f"{self.shape.name} in {self.weights}"
            raise SetupError(f"{name} does not fit on {self.gpus} x {self.gpu}: give more by --tensor-parallel-size")
        name = f"{self.gpus} x {self.gpu}"
        return Profile(
            model=self.shape.name,
            source=f"roofline: {self.shape.name}, {name}, {self.weights}",
            machine=Machine(threads=1, device=name),
            engine=EngineFacts(
                block_size=BLOCK,
                block_bytes=self.layout.block_bytes,
                num_blocks=tokens // BLOCK,
                num_pages=self.num_pages,
                groups=groups_of(self.layout, self.shape.kv.window),
                max_num_seqs=MAX_SEQS,
                max_model_len=min(self.shape.max_model_len, tokens),
                dtype="bfloat16",
            ),
            step=self.step,
            transfers=self.transfers,
            overheads=Overheads(engine_step_s=0.0, engine_sequence_s=0.0),
            assumed=("step", "transfers", "swap", "start_up_s", "role_flip_s", "overheads"),
        )
