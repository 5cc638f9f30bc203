"""A setting of the command line whose value is JSON."""

from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from pdserve.errors import SetupError

T = TypeVar("T")


def read_json_setting(flag: str, text: str, shape: type[T], item: type[BaseModel]) -> T:
    """Return the value of a flag.

    Args:
        shape: of the whole value: `item` or a collection of it.
        item: the objects in it, whose fields are the known keys.

    Raises:
        SetupError: the text is not JSON of this shape, or a key or value is unknown.
    """
    try:
        return TypeAdapter(shape).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        known = ", ".join(item.model_fields)
        reason = f"unknown key; known are {known}" if first["type"] == "extra_forbidden" else first["msg"]
        raise SetupError(f"{flag}: {place + ': ' if place else ''}{reason}") from error
