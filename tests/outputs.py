"""Readers of the outputs in the frames of instances."""

from pdserve.output import Output, unpack
from pdserve.proto import pdserve_pb2 as pb


def outputs_of(frame: pb.InstanceFrame) -> list[Output]:
    """Return the outputs in a frame; none if it is of another kind."""
    return unpack(frame.outputs) if frame.WhichOneof("frame") == "outputs" else []


def is_stored(output: Output) -> bool:
    """Return whether prefill has stored all KV of its prompt, or all that it ever will."""
    return output.stored is not None and output.stored.final


def num_stored(output: Output | None) -> int:
    """Return how many leading blocks of its prompt prefill has stored, as far as the output tells."""
    return 0 if output is None or output.stored is None else output.stored.num_blocks
