"""Finished answers of an instance, in which others of the same API key and salt may find what follows.

What one tenant's requests have left can only be found with its key and salt: another's text neither shows nor saves time.
"""

from array import array

from pdserve.engine.sequence import Sequence
from pdserve.speculation.matches import LEVELS, SEPARATOR, Index, Match

TOKEN_BYTES = 170  # a token and its place in the index
OWNER_BYTES = 4 << 20  # of the answers of one key and salt
TOTAL_BYTES = 64 << 20
LEAST = 8  # tokens of an answer that is worth keeping

Owner = tuple[int, bytes]  # tenant, and the key of no tokens, which follows from weights and salt


def owner_of(seq: Sequence) -> Owner:
    """Return on whose behalf a sequence runs, and with which salt."""
    return seq.tenant.id, seq.kv.chain.root


class _Texts:
    """The answers of one owner. Once the newer half is full, it takes the place of the older one."""

    def __init__(self) -> None:
        self._newer, self._older = Index(array("I")), Index(array("I"))

    @property
    def nbytes(self) -> int:
        return (len(self._newer.text) + len(self._older.text)) * TOKEN_BYTES

    def add(self, text: "array[int]") -> None:
        most = OWNER_BYTES // 2 // TOKEN_BYTES
        if len(self._newer.text) + len(text) > most:
            self._newer, self._older = Index(array("I")), self._newer
        self._newer.text.extend(text[-most:])
        self._newer.extend()

    def find(self, tokens: "array[int]", gram: int, *, last: bool = False) -> Match | None:
        newer, older = self._newer.find(tokens, gram, last=last), self._older.find(tokens, gram, last=last)
        return older if newer is None or (older is not None and older.length > newer.length) else newer


class FinishedAnswers:
    """The answers of all owners, bounded in bytes: those of the owner who has not used them for longest go first."""

    def __init__(self) -> None:
        self._texts: dict[Owner, _Texts] = {}  # the last used last
        self.nbytes = 0

    def add(self, seq: Sequence) -> None:
        """Keep the answer of a sequence that is over, unless its request is to leave nothing."""
        if seq.leaves_nothing or seq.group is not None or seq.output.num_generated < LEAST:
            return
        owner = owner_of(seq)
        texts = self._texts.pop(owner) if owner in self._texts else _Texts()
        self._texts[owner] = texts
        before = texts.nbytes
        start = max(0, seq.output.num_prompt - LEVELS[-1])  # the end of the prompt tells answers apart
        texts.add(seq.output.tokens[start:] + array("I", [SEPARATOR]))
        self.nbytes += texts.nbytes - before
        while self.nbytes > TOTAL_BYTES:
            self.nbytes -= self._texts.pop(next(iter(self._texts))).nbytes

    def find(self, seq: Sequence, gram: int, *, last: bool = False) -> Match | None:
        """Return where the answers of a sequence's owner have its last tokens, which are a gram; None if nowhere."""
        texts = self._texts.get(owner_of(seq))
        return None if texts is None else texts.find(seq.output.tokens, gram, last=last)

    def clear(self) -> None:
        """Forget all answers."""
        self._texts.clear()
        self.nbytes = 0
