"""GPUs as in their data sheets, dense figures of the SXM variants where there are several."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        memory: bytes.
        bytes_per_s: of its memory.
        flops: operations per second of tensor cores in 16 bits.
        fp8_flops: in 8 bits; those of 16 bits where it has none.
        peer_bytes_per_s: to another GPU of the host, one way: NVLink, or PCIe where it has none.
        peer_latency_s: of a sum over the GPUs of a host, of few bytes.
        host_bytes_per_s: to the host's memory, one way: PCIe.
    """

    memory: float
    bytes_per_s: float
    flops: float
    fp8_flops: float
    peer_bytes_per_s: float
    peer_latency_s: float
    host_bytes_per_s: float


NVLINK_S, PCIE_S = 1e-5, 3e-5
DEVICES = {
    "a100": Device(80e9, 2.039e12, 312e12, 312e12, 300e9, NVLINK_S, 32e9),
    "h100": Device(80e9, 3.35e12, 989e12, 1979e12, 450e9, NVLINK_S, 64e9),
    "h200": Device(141e9, 4.8e12, 989e12, 1979e12, 450e9, NVLINK_S, 64e9),
    "b200": Device(180e9, 8e12, 2250e12, 4500e12, 900e9, NVLINK_S, 64e9),
    "l40s": Device(48e9, 0.864e12, 362e12, 733e12, 32e9, PCIE_S, 32e9),
}


@dataclass(frozen=True)
class Weights:
    """A format of weights.

    Attributes:
        size: bytes of a parameter, its scales included.
        reach: of the memory's rate, that kernels which read them reach.
        is_8_bit: products are computed in 8 bits where the GPU can.
    """

    size: float
    reach: float
    is_8_bit: bool = False


WEIGHTS = {
    "bf16": Weights(2.0, 0.8),
    "fp8": Weights(1.0, 0.7, is_8_bit=True),
    "int8": Weights(1.0, 0.65),
    "w4a16": Weights(0.56, 0.5),
}
