"""Pooling of a text's hidden states into its embedding: by sentence-transformers' files of the model, or by `--pooling`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import SetupError

MODES = ("last", "mean", "cls")
_NAMES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}


@dataclass(frozen=True)
class Pooling:
    """Pooling of the last hidden states.

    Attributes:
        mode: which states count: of the `last` token, of the first (`cls`), or the `mean` of all.
        normalize: scale the vector to length 1.
        num_classes: of a classifier, in place of the vector: how many classes' probabilities; else 0.
    """

    mode: str
    normalize: bool = True
    num_classes: int = 0


def read_pooling(model: Path, setting: str, num_labels: int = 0) -> Pooling | None:
    """Return the pooling that the setting names; `auto`: that of the model's files, or None if it has none.

    Args:
        num_labels: classes of the model, if it is a classifier.

    Raises:
        SetupError: the files ask for something else.
    """
    if num_labels and setting != "auto":
        raise SetupError(f"{model} is a classifier, which has no embeddings: leave out --pooling {setting}")
    if num_labels or setting == "yes-no":
        return Pooling("last", normalize=False, num_classes=num_labels or 1)
    if setting in MODES:
        return Pooling(setting)
    modules_file = model / "modules.json"
    if setting == "off" or not modules_file.is_file():
        return None
    modules = {module["type"].rpartition(".")[2]: module["path"] for module in json.loads(modules_file.read_text())}
    if "Pooling" not in modules or (others := modules.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise SetupError(f"{modules_file} asks for {sorted(others) or 'no pooling'}; --pooling off ignores it")
    config = json.loads((model / modules["Pooling"] / "config.json").read_text())
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _NAMES:
        raise SetupError(f"{modules_file} pools by {modes}; supported are {sorted(_NAMES)}, --pooling sets one")
    return Pooling(_NAMES[modes[0]], "Normalize" in modules)


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the names of the poolings that are switched on, in the files of either format."""
    if "pooling_mode" in config:
        return [config["pooling_mode"]] if isinstance(config["pooling_mode"], str) else [*config["pooling_mode"]]
    prefix = "pooling_mode_"
    return [name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on is True]
