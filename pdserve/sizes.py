"""Sizes in bytes, as users write them."""

LARGEST = 2**62  # beyond, no file and no memory can be asked for


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `4GiB`, `512M` or `1048576` means.

    K, M, G and T are powers of 1024, with or without `iB` or `B`.

    Raises:
        ValueError: `text` is not a size.
    """
    number = text.strip().rstrip("Bb").rstrip("i").rstrip()
    factor = 1
    if number and number[-1].upper() in "KMGT":
        factor = 1024 ** ("KMGT".index(number[-1].upper()) + 1)
        number = number[:-1]
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):  # no number, or an infinite one
        raise ValueError(f"{text!r} is not a size; write bytes, or a size such as 512MiB or 4GiB") from None
    if not 0 < size < LARGEST:
        raise ValueError(f"{text!r} must be more than 0 bytes, and less than 4 EiB")
    return size
