"""Tensor parallelism: one model on several devices, each with a process, a rank, that has a slice of every layer."""
