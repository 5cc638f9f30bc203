"""Locates a model's files: the bundled demo, a local directory, or the model hub."""

from pathlib import Path

from pdserve.errors import SetupError

DEMO = Path(__file__).parent / "demo_model"


def resolve_model(name: str) -> Path | str:
    """Return the directory of `demo` or of a local path. Any other name is a hub id and is returned unchanged.

    Raises:
        SetupError: the name looks like a path, and the directory does not exist.
    """
    if name == "demo":
        if not DEMO.is_dir():
            raise SetupError(f"the bundled demo model is missing: {DEMO}")
        return DEMO
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise SetupError(f"{name} is a GGUF file: write it as a checkpoint by `pdserve convert-gguf {name} DIRECTORY`")
    if not name or name[0] in "./~" or name.count("/") > 1:
        raise SetupError(f"no such model directory: {name or '(empty name)'}")
    return name


def check_model(name: str) -> None:
    """Raise SetupError if `name` is no model. This imports nothing: only loading tells whether the hub has an id."""
    if isinstance(path := resolve_model(name), Path):
        check_checkpoint(path)


def check_checkpoint(path: Path) -> None:
    """Raise SetupError unless a directory has a config and weights."""
    if not (path / "config.json").is_file():
        raise SetupError(f"{path} is not a checkpoint: config.json is missing")
    if not any(path.glob("*.safetensors")):
        raise SetupError(f"{path} has no *.safetensors: other formats are not supported")


def model_folder(name: str) -> Path:
    """Return the local directory of a model's config and tokenizer; of a hub id, that of the downloaded files.

    Raises:
        SetupError: there is no such model.
    """
    path = resolve_model(name)
    if isinstance(path, Path):
        return path
    from transformers.utils.hub import cached_file  # takes a second to import

    try:
        config = cached_file(path, "config.json")
    except OSError as error:
        raise SetupError(f"{name} has no config.json: {error}") from error
    assert config is not None
    return Path(config).parent
