"""Low-rank adapters (LoRA, Hu et al. 2021) over one base model: what they add to its layers, by content and never by name.

In reading order: checkpoint, sharing, slot_table, slots.
"""
