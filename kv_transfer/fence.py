"""`Fence` and `Expired` of blocks.py, under the name by which connectors of others import them."""

from pdserve.kv_transfer.blocks import Expired, Fence

__all__ = ["Expired", "Fence"]
