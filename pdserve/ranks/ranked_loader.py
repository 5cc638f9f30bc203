"""Conversion of layouts on all ranks: each loads the heads of its pool."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict

from pdserve.decode.layout_converter import SourceLoader
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Result, Stats
from pdserve.ranks.followers import Followers
from pdserve.ranks.messages import Convert, ReleaseConverted
from pdserve.ranks.ranked_connector import join_transfers


class RankedLoader:
    """Loads KV of one source layout: rank 0 with its own loader, and the followers with theirs."""

    def __init__(self, followers: Followers, own: SourceLoader, source: Layout) -> None:
        self._own = own
        self._source = asdict(source)
        self._followers = followers

    def load(self, keys: list[bytes], tokens: range, blocks: list[int], tickets: list[bytes]) -> Future[Result]:
        what = self._source, self._own.at, keys, tokens.start, tokens.stop, blocks, tickets
        operation, others = self._followers.transfer(lambda operation, _: Convert(operation, *what))
        return join_transfers(self._followers, self._own.load(keys, tokens, blocks, tickets), operation, others)

    def release(self, keys: Sequence[bytes], tickets: Sequence[bytes]) -> None:
        self._followers.send(ReleaseConverted(self._source, self._own.at, list(keys), list(tickets)))
        self._own.release(keys, tickets)

    def stats(self) -> Stats:
        """Return the counters of rank 0."""
        return self._own.stats()

    def probe(self) -> None:
        self._own.probe()

    def close(self) -> None:
        self._own.close()
