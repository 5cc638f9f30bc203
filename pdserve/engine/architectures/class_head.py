"""Output layers that classify: of sequence classifiers, and of rerankers that answer "yes" or "no" (Qwen3-Reranker).

The classes of a text are those of its last token. The layer takes the place of the model's output layer over the vocabulary.
"""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import safe_open

from pdserve.engine.architectures.adapters import Source
from pdserve.errors import SetupError

NAME = "score.weight"  # of the decoders' classifiers in transformers


def num_labels(hf_config: Any) -> int:
    """Return the classes of a sequence classifier; 0 for another architecture."""
    is_classifier = any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or ())
    return int(hf_config.num_labels) if is_classifier else 0


def adapt(model: Any, source: Source) -> None:
    """Let a classifier, or with the pooling `yes-no` any model, end in a layer [classes, hidden]: an adapter.

    The probability of "yes" beside "no" is the sigmoid of the difference of their logits.

    Raises:
        SetupError: the checkpoint has no such layer, or its tokenizer no such tokens.
    """
    if num_labels(source.config):
        weight = _checkpoint_tensor(source.path)
    elif source.pooling == "yes-no":
        vocabulary = tokenizers.Tokenizer.from_file(str(source.path / "tokenizer.json"))
        yes, no = (vocabulary.token_to_id(word) for word in ("yes", "no"))
        if yes is None or no is None:
            raise SetupError("--pooling yes-no needs a model whose tokenizer has the tokens yes and no")
        rows = model.get_output_embeddings().weight
        weight = (rows[yes] - rows[no])[None]
        if weight.isnan().any():  # its values stay in the checkpoint, see low_bit/checkpoint.py
            raise SetupError("--pooling yes-no: not with a quantized output layer")
    else:
        return
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=model.dtype, device=model.device)
    head.weight.data.copy_(weight)
    model.set_output_embeddings(head)


def _checkpoint_tensor(path: Path) -> torch.Tensor:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if NAME in tensors.keys():  # noqa: SIM118, it is no mapping
                weight: torch.Tensor = tensors.get_tensor(NAME)
                return weight
    raise SetupError(f"{path} is a sequence classifier without {NAME}, which decoders have")
