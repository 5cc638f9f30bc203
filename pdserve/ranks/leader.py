"""Start of an instance with several ranks."""

import logging

from pdserve.config import InstanceConfig
from pdserve.engine.checkpoint_loader import load
from pdserve.engine.parallel.rank_group import listen
from pdserve.ranks.followers import Followers
from pdserve.ranks.rank_config import config_of_rank, make_group, use_threads
from pdserve.ranks.runners import LeadingRunner

log = logging.getLogger(__name__)


def start_ranks(config: InstanceConfig) -> LeadingRunner:
    """Start the followers of an instance, load the model on all ranks, and return the runner of rank 0.

    Raises:
        SetupError: the model cannot be loaded or divided, or there are fewer GPUs than ranks.
    """
    own = config_of_rank(config, 0)
    use_threads(config)
    listener = listen()
    followers = Followers(config, listener.getsockname()[1])
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
