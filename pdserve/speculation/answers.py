"""Finished answers of an instance, in which others of the same API key and salt may find what follows.

What one tenant's requests have left can only be found with its key and salt: another's text neither shows nor saves time.
"""

from array import array

from pdserve.engine.sequence import Sequence
from pdserve.keys import TOKEN_BYTES, Tokens
from pdserve.speculation.matches import LEVELS, SEPARATOR, Match, find

OWNER_BYTES = 256 << 10  # of the answers of one key and salt, which a lookup reads in some ten microseconds
TOTAL_BYTES = 64 << 20
LEAST = 16  # tokens of an answer that is worth keeping

Owner = tuple[int, bytes]  # tenant, and the key of no tokens, which follows from weights and salt


def owner_of(seq: Sequence) -> Owner:
    """Return on whose behalf a sequence runs, and with which salt."""
    return seq.tenant.id, seq.kv.chain.root


class FinishedAnswers:
    """The answers of all owners, bounded in bytes: those of the owner who has not got one for longest go first."""

    def __init__(self) -> None:
        self._texts: dict[Owner, Tokens] = {}  # the last that got one last
        self.nbytes = 0

    def add(self, seq: Sequence) -> None:
        """Keep the answer of a sequence that is over, unless its request is to leave nothing."""
        if seq.leaves_nothing or seq.group is not None or seq.output.num_generated < LEAST:
            return
        owner, most = owner_of(seq), OWNER_BYTES // TOKEN_BYTES
        text = self._texts.pop(owner) if owner in self._texts else array("I")
        before = len(text)
        start = max(0, seq.output.num_prompt - LEVELS[-1])  # the end of the prompt tells answers apart
        text.extend(seq.output.tokens[start:][1 - most :])
        text.append(SEPARATOR)
        if len(text) > most:
            text = text[-(most // 2) :]  # a copy: drafts may follow the whole one
        self._texts[owner] = text
        self.nbytes += (len(text) - before) * TOKEN_BYTES
        while self.nbytes > TOTAL_BYTES:
            self.nbytes -= len(self._texts.pop(next(iter(self._texts)))) * TOKEN_BYTES

    def find(self, seq: Sequence, most: int) -> Match | None:
        """Return where the answers of a sequence's owner have what it ends with; see `matches.find`."""
        text = self._texts.get(owner_of(seq))
        return None if text is None else find(text, seq.output.tokens, most)
