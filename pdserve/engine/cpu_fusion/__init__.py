"""CPU replacements of model layers: fused norms, rotary embeddings and MLPs, and linear layers with prepacked weights.

A fused layer replaces a module only if it gives the same results on random inputs: models differ in where they round.
"""
