"""What engines do on GPUs only: an extension, which the core finds as `gpu` in `pdserve.extensions`.

In reading order: back_end, fused_attention, fused_layer, cuda_graph, step_memory.
"""
