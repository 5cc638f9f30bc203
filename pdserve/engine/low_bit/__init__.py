"""Weights of 4 and 8 bits: read from the formats in which checkpoints have them, or rounded from 16 bits as they are loaded.

The model keeps the values that a weight stands for, so whatever computes with them gives the same. Where the kernels of CPUs
pack 16-bit weights, they pack the codes instead (`pdserve.kernels.low_bit`), and no dense copy stays.

Reading order:
    packing.py       integers of 4 and 8 bits in words of 32
    formats.py       the tensors of a layer in GPTQ, AWQ and compressed-tensors, and what of these is supported
    checkpoint.py    a quantized checkpoint as a model
    rounding.py      a model in 16 bits, rounded
"""
