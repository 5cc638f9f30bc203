"""Published timings as profiles, from excerpts of their files, and what a live fleet reports."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.errors import SetupError
from pdserve.tools.profiling.imports import _of_instance, from_fleet, import_file

DISTSERVE = {  # LLMServe/DistServe, Apache-2.0; ms
    "facebook/opt-13b": {
        "1": {
            "decoding_large_small_bs_threshold": 95,
            "prefill": [18.10254647486372, 0.1019122572698738, 7.122264314252114e-06],
            "decoding_smallbs": [19.934702624895458, 0.0006269356524350583, 0.03850697740828398],
            "decoding_largebs": [7.1661889468253595, 0.0005798000403396046, 0.15831096191764046],
        }
    }
}
SPLITWISE = """\
model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,tensor_parallel
llama2-70b,a100-80gb,512,1,128,1.0,0.7,196.25,54.88,7168.9,2
llama2-70b,a100-80gb,512,1,128,1.0,0.7,198.25,54.88,7168.9,2
llama2-70b,a100-80gb,512,1,128,1.0,0.7,500.0,54.88,7168.9,2
llama2-70b,a100-80gb,1024,1,128,1.0,0.7,380.0,55.1,7168.9,2
llama2-70b,a100-80gb,512,2,128,1.0,0.7,385.0,56.0,7168.9,2
llama2-70b,a100-80gb,512,16,128,1.0,0.7,2900.0,66.0,7168.9,2
llama2-70b,h100-80gb,512,1,128,1.0,0.7,96.25,34.88,7168.9,2
"""  # Mutinifni/splitwise-sim, MIT; ms; the times beyond the first row are made up


def test_distserve_is_its_formula(tmp_path: Path) -> None:
    file = tmp_path / "distserve_profile_a100_80g.json"
    file.write_text(json.dumps(DISTSERVE))
    (tmp_path / "distserve_max_num_tokens.csv").write_text(
        "model,tp,pp,max_num_tokens\nfacebook/opt-13b,1,1,66144\nfacebook/opt-13b,1,2,163008\n"
    )
    profile = import_file("distserve", str(file), "")
    assert profile.model == "facebook/opt-13b" and profile.engine.num_blocks == 66144 // 16
    assert profile.step.seconds([(700, 0)]) * 1e3 == pytest.approx(
        18.1025 + 0.101912 * 700 + 7.1223e-6 * 700**2, rel=1e-3
    )
    small = 19.9347 + 0.00062694 * 20 * 501 + 0.038507 * 20
    large = 7.1662 + 0.0005798 * 150 * 501 + 0.158311 * 150
    assert profile.step.seconds([(1, 500)] * 20) * 1e3 == pytest.approx(small, rel=0.03)
    assert profile.step.seconds([(1, 500)] * 150) * 1e3 == pytest.approx(large, rel=0.03)
    assert profile.residuals["decode"].p99 < 0.05 and profile.residuals["prefill"].p99 < 1e-6
    assert "transfers" in profile.assumed and profile.transfers == {}


def test_splitwise_medians_are_fitted(tmp_path: Path) -> None:
    file = tmp_path / "splitwise.csv"
    file.write_text(SPLITWISE)
    profile = import_file("splitwise", str(file), "llama2-70b,a100-80gb,2")
    assert profile.machine.device == "a100-80gb x2"
    assert profile.step.seconds([(512, 0)]) == pytest.approx(0.19825, rel=0.05), "the median of three"
    assert profile.step.seconds([(1, 576)] * 16) == pytest.approx(0.066, rel=0.05)
    with pytest.raises(
        SetupError, match=r"--import-entry must be one of: llama2-70b,a100-80gb,2; llama2-70b,h100-80gb,2"
    ):
        import_file("splitwise", str(file), "")


@pytest.mark.parametrize("source", ["distserve", "splitwise"])
@pytest.mark.parametrize(
    "text", ["{}x", '{"a": {"1": {}}}', '["a"]', "prompt_size\nmany", "[" * 100_000, f"prompt_size\n{'9' * 200_000}"]
)
def test_another_file_is_refused(tmp_path: Path, source: str, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(SetupError, match=r"file is not a file of|--import-entry"):
        import_file(source, str(file), "")
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        import_file(source, str(tmp_path / "none"), "")


def test_a_fleet_gives_its_lines() -> None:
    costs = {"prefill": [0.002, 2e-5, 3e-8], "decode": [0.001, 3e-5, 2e-7], "transfer": [1e-4, 5e-10], "swap": [0, 0]}
    reported = {"instance_id": "both-0", "model": "demo", "device": "cpu", "numerics": "n", "connector": "shm"}
    profile = _of_instance(reported | {"block_size": 16, "num_blocks": 9, "dtype": "bfloat16", "costs": costs})
    assert profile.costs.prefill == pytest.approx((0.002, 2e-5, 3e-8), rel=1e-6)
    assert profile.costs.decode == pytest.approx((0.001, 3e-5, 2e-7), rel=1e-6)
    assert profile.transfer("shm").seconds(10**9) == pytest.approx(0.5001)
    mixed = profile.step.seconds([(100, 0), *[(1, 9)] * 40])
    assert mixed == pytest.approx(0.001 + 40 * 3e-5 + 400 * 2e-7 + 100 * 2e-5 + 5000 * 3e-8)
    with pytest.raises(SetupError, match="gives no /debug/instances"):
        from_fleet("http://127.0.0.1:9")


@pytest.mark.parametrize("found", [[], ["a"], [{"instance_id": "one"}], {"one": 1}, 3])
def test_instances_of_another_kind_of_router_are_one_line(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, json={"instances": found}, request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(httpx.Client, "get", lambda *_, **__: answer)
    with pytest.raises(SetupError, match=r"gives no /debug/instances of a pdserve router|has no instance at all"):
        from_fleet("http://x")
