"""GPU back end of the engine: an extension, which the core loads by the name `gpu` of the group `pdserve.extensions`.

In reading order: back_end, fused_attention, fused_layer, cuda_graph, step_memory.
"""
