"""Model of an instance: what a profile says of blocks of another size, and of a pool that is smaller."""

from dataclasses import replace

import pytest

from pdserve.errors import SetupError
from pdserve.profile.profile import EngineFacts, Profile
from pdserve.tools.load_config import PlanConfig
from pdserve.tools.simulator.fleet import check_fits
from pdserve.tools.simulator.model import InstanceModel

PROFILE = Profile(model="m", engine=EngineFacts(16, 4096, 1000, max_model_len=4096), swap=(1e-3, 2e-3))


def test_the_same_kv_takes_as_long_in_blocks_of_any_size() -> None:
    small, large = (InstanceModel.from_profile(PROFILE, "shm", block_size=size) for size in (16, 512))
    assert small.num_blocks * 16 == pytest.approx(large.num_blocks * 512, rel=0.05)
    assert large.layout.block_bytes == 32 * small.layout.block_bytes
    assert large.swap_seconds(2) == pytest.approx(small.swap_seconds(64))


def test_requests_have_to_fit_into_the_pool_too() -> None:
    config = PlanConfig(num_blocks=20, num_prompts=3, random_input_len=400, random_output_len=20, request_rate=1.0)
    assert InstanceModel.from_profile(PROFILE, "shm", num_blocks=20).max_model_len == 320
    with pytest.raises(SetupError, match="3 of 3 requests need up to 420 tokens, and an instance takes 320"):
        check_fits(config, PROFILE)
    check_fits(replace(config, num_blocks=27), PROFILE)
