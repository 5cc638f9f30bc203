"""The memory of request bodies that are under way: being read, or complete and not yet parsed."""

from collections import Counter
from collections.abc import Callable

from pdserve.errors import Overloaded

MAX_BYTES = 512 << 20  # of all keys
KEY_SHARE = 4  # one key may have this part of them


class BodyBudget:
    """Counts the bytes of bodies under way, in all and of each API key.

    Args:
        has_keys: clients have API keys; otherwise there is one key, which may use all.
        largest: bytes of the largest body; one of each key always fits.
        on_refusal: called with the name of a key whose body was refused.
    """

    def __init__(self, *, has_keys: bool, largest: int, on_refusal: Callable[[str], None]) -> None:
        share = KEY_SHARE if has_keys else 1
        self.max_bytes_of_key = max(MAX_BYTES // share, largest)
        self.max_bytes = max(MAX_BYTES, share * self.max_bytes_of_key)
        self.num_bytes = 0
        self._of_key: Counter[str] = Counter()
        self._on_refusal = on_refusal

    def reserve(self, key: str, num_bytes: int) -> None:
        """Count bytes of a key's body. Raises Overloaded if they are too many, and counts none of them."""
        of_key = self._of_key[key] + num_bytes
        for total, most, whose in (
            (of_key, self.max_bytes_of_key, "this API key"),
            (self.num_bytes + num_bytes, self.max_bytes, "all clients"),
        ):
            if total > most:
                self._on_refusal(key)
                message = (
                    f"the bodies of {whose} that are being read or parsed would have {total} bytes, of at most {most}"
                )
                raise Overloaded(f"{message}; send fewer at once", kind="body_bytes", retry_after_s=1)
        self._of_key[key] = of_key
        self.num_bytes += num_bytes

    def release(self, key: str, num_bytes: int) -> None:
        """Count them no more."""
        self.num_bytes -= num_bytes
        self._of_key[key] -= num_bytes
        if not self._of_key[key]:
            del self._of_key[key]
