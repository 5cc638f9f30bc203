"""Start of an instance with several ranks."""

import logging
from dataclasses import dataclass

from pdserve.config import InstanceConfig
from pdserve.decode.layout_converter import SourceLoader
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.parallel.rank_group import listen
from pdserve.keys import Layout
from pdserve.kv_transfer.connector import Connector
from pdserve.ranks.followers import Followers
from pdserve.ranks.rank_config import config_of_leader, make_group, use_threads
from pdserve.ranks.ranked_connector import RankedConnector
from pdserve.ranks.ranked_loader import RankedLoader
from pdserve.ranks.runners import LeadingRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """The other ranks of an instance: wraps what rank 0 does, so that they do the same."""

    followers: Followers

    def connector(self, own: Connector) -> Connector:
        return RankedConnector(own, self.followers)

    def loader(self, own: SourceLoader, source: Layout) -> RankedLoader:
        return RankedLoader(self.followers, own, source)

    def close(self) -> None:
        self.followers.close()


def start(config: InstanceConfig) -> tuple[LeadingRunner, Ranks]:
    """Start the ranks of an instance, and return the runner of rank 0 and the others. Raises as `start_ranks`."""
    runner = start_ranks(config)
    return runner, Ranks(runner.followers)


def start_ranks(config: InstanceConfig) -> LeadingRunner:
    """Start the followers of an instance, load the model on all ranks, and return the runner of rank 0.

    Raises:
        SetupError: the model cannot be loaded or divided, or there are fewer GPUs than ranks.
    """
    own = config_of_leader(config)
    use_threads(config)
    listener = listen()
    followers = Followers(own, listener.getsockname()[1])
    log.info("started ranks 1 to %d in processes %s", len(followers), ", ".join(map(str, followers.pids)))
    log.info("with several ranks, each decode step runs the model's Python: there are no step graphs")
    try:
        group = make_group(own, 0, listener.getsockname()[1], listener)
        runner = LeadingRunner(load(own, group), own, followers)
        followers.wait_ready()
    except BaseException:
        followers.kill()
        listener.close()
        raise
    return runner
