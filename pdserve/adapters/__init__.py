"""Low-rank adapters (LoRA, Hu et al. 2021) over one base model: what they add to its layers, by content and never by name.

In reading order: experts, checkpoint, sharing, expert_delta, layers, ranked_layers, slot_table, slots.
"""
