"""Scripts for vLLM's class `LLM`, which run with the import changed: what its published examples use, on the demo model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve import LLM, GuidedDecodingParams, KVTransferConfig, SamplingParams, StructuredOutputsParams
from pdserve.cli.supervisor import Supervisor
from pdserve.offline.arguments import settings_of

Run = Callable[[str], dict[str, Any]]

BASIC = """
from vllm import LLM, SamplingParams

prompts = ["The capital of France is", "The capital of Italy is"]
sampling_params = SamplingParams(temperature=0, top_p=0.95, max_tokens=8, logprobs=3, prompt_logprobs=2)
llm = LLM(model="demo", enforce_eager=True, trust_remote_code=False, max_model_len=256, scheduling_policy="priority")
outputs = llm.generate(prompts, sampling_params, priority=[1, 0])
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
again = llm.generate(prompts[0], sampling_params, use_tqdm=False)[0]
tokenizer = llm.get_tokenizer()
"""
CHAT = """
from vllm import LLM
from vllm.sampling_params import SamplingParams

llm = LLM(model="demo", seed=0)
conversation = [{"role": "user", "content": "What is the capital of France?"}]
outputs = llm.chat([conversation] * 2, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
short = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False, add_generation_prompt=False)
"""
STRUCTURED = """
from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

llm = LLM(model="demo", max_model_len=200)

def answer(prompt, **asked):
    params = SamplingParams(temperature=0, max_tokens=24, **asked)
    return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0].text

choice = answer("Good?", structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
regex = answer("An address:", structured_outputs=StructuredOutputsParams(regex=r"\\w{1,9}@\\w{1,9}\\.com"))
old = answer("Good?", guided_decoding=GuidedDecodingParams(choice=["Yes", "No"]))
"""
BEAMS = """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="demo")
params = BeamSearchParams(beam_width=3, max_tokens=6)
outputs = llm.beam_search([{"prompt": "The capital of France is"}, {"prompt": "One"}], params)
"""
POOLING = """
from vllm import LLM

llm = LLM(model="demo", runner="pooling", enforce_eager=True, pooling="mean")
outputs = llm.embed(["Paris is in France.", "Rome is in Italy."])
(same, other) = llm.score("Rome is in Italy.", ["Rome is in Italy.", "Bread"])
"""
STORE = """
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = {"prompt_token_ids": list(range(10, 110))}
config = KVTransferConfig(kv_connector="file://FOLDER", kv_role="kv_both")
for _ in range(2):
    llm = LLM(model="demo", kv_transfer_config=config, enable_prefix_caching=True)
    outputs = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.close()
"""


@pytest.fixture
def run_script(fork_server: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run_script(text) → the script's names, after it ran on `pdserve` in place of `vllm`."""
    monkeypatch.setattr(Supervisor, "_spawn", lambda _, *command: fork_server.spawn(*command))

    def run(text: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        try:
            exec(re.sub(r"from vllm[\w.]* import", "from pdserve import", text), names)
        finally:
            names["llm"].close()
        return names

    return run


def test_basic(run_script: Run, capfd: pytest.CaptureFixture[str]) -> None:
    names = run_script(BASIC)
    first = names["outputs"][0]
    answer = first.outputs[0]
    assert "Paris" in answer.text and "Rome" in capfd.readouterr().out
    assert answer.finished() and answer.finish_reason in ("stop", "length")
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(entry) == 3 and entry[token].rank == 1  # greedy
        assert entry[token].decoded_token == names["tokenizer"].decode([token], skip_special_tokens=True)
        assert sorted(one.rank for one in entry.values()) == [1, 2, 3]
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert first.num_cached_tokens == 0 and names["again"].outputs[0].token_ids == answer.token_ids
    assert first.lora_request is None and first.metrics is None


def test_chat(run_script: Run) -> None:
    names = run_script(CHAT)
    assert all("Paris" in output.outputs[0].text for output in names["outputs"])
    assert len(names["short"][0].prompt_token_ids) < len(names["outputs"][0].prompt_token_ids)


def test_structured_outputs(run_script: Run) -> None:
    names = run_script(STRUCTURED)
    assert names["choice"] in ("Positive", "Negative") and names["old"] in ("Yes", "No")
    assert re.fullmatch(r"\w{1,9}@\w{1,9}\.com", names["regex"])


def test_beam_search(run_script: Run) -> None:
    first, second = (output.sequences for output in run_script(BEAMS)["outputs"])
    assert len(first) == len(second) == 3
    assert first[0].text.startswith("The capital of France is") and "Paris" in first[0].text
    assert [beam.cum_logprob for beam in first] == sorted((beam.cum_logprob for beam in first), reverse=True)
    assert len({tuple(beam.tokens) for beam in first}) == 3


def test_pooling(run_script: Run) -> None:
    names = run_script(POOLING)
    first, second = (output.outputs for output in names["outputs"])
    assert first.hidden_size == len(second.embedding) == 256 and first.embedding != second.embedding
    assert names["other"].outputs.score < names["same"].outputs.score == pytest.approx(1, abs=1e-3)


def test_what_one_program_has_stored_another_loads(run_script: Run, tmp_path: Path) -> None:
    assert run_script(STORE.replace("FOLDER", str(tmp_path)))["outputs"][0].num_cached_tokens == 96


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, ValueError, "kv_connector is a URL here"),
        ({"trust_remote_code": True}, ValueError, "trust_remote_code=True is not supported; leave it out"),
        ({"pipeline_parallel_size": 2}, ValueError, "pipeline_parallel_size=2 is not supported"),
        ({"speculative_config": {"tokens": 4}}, ValueError, "--speculative-config needs a method"),
        (
            {"tensor_paralel_size": 2},
            TypeError,
            "no argument 'tensor_paralel_size'; did you mean 'tensor_parallel_size'?",
        ),
        ({"gpus": 2}, TypeError, "LLM has no argument 'gpus'; it takes the flags of `pdserve up`"),
        ({"kv_transfer_config": "file:///kv"}, ValueError, "kv_transfer_config must be a KVTransferConfig"),
        ({"num_blocks": "many"}, ValueError, "num_blocks must be int, not 'many'"),
        ({"prefill": "1"}, ValueError, "prefill must be int, not '1'"),
        ({"keys_file": "keys.toml"}, ValueError, "keys_file='keys.toml' is not supported; leave it out"),
        ({"on": "ray"}, ValueError, "on='ray' is not supported"),
        ({"autoscale": "ttft.p90=1s", "profile": "p.json"}, ValueError, "autoscale='ttft.p90=1s' is not supported"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        LLM("demo", **arguments)


def test_arguments_and_parameters_of_vllm() -> None:
    config = KVTransferConfig("redis://host", "kv_producer")
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    assert settings_of({"kv_transfer_config": config, "enable_prefix_caching": False, "speculative_config": ngram}) == {
        "connector": "redis://host",
        "prefix_caching": "off",
        "speculative_config": json.dumps(ngram),
    }
    nothing = ("quantization", "kv_transfer_config", "speculative_config", "max_model_len", "dtype", "tokenizer")
    assert not settings_of(dict.fromkeys(nothing)), "None is the default of each"
    assert settings_of({"max_num_seqs": 8, "lora_folder": Path("a"), "swap_space": 4}) == {
        "max_num_seqs": 8,
        "lora_folder": "a",
        "swap_space": 4.0,
    }
    with pytest.raises(ValueError, match="kv_role is one of"):
        KVTransferConfig("redis://host", "producer")
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})).body()
    assert asked["structured_outputs"] == {"json": {"type": "object"}}
    assert SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")).body()["structured_outputs"] == {
        "regex": "a"
    }
    assert {"guided_decoding", "detokenize"}.isdisjoint(SamplingParams().body())
    with pytest.raises(ValueError, match="older name"):
        SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"), structured_outputs={"regex": "b"})
    wrong: list[tuple[dict[str, Any], str]] = [({}, "none"), ({"regex": "a", "choice": ["b"]}, "regex and choice")]
    for given, what in wrong:
        with pytest.raises(ValueError, match=f"exactly one of .* must be set, not {what}"):
            StructuredOutputsParams(**given)
    with pytest.raises(ValueError, match="detokenize=False is not supported"):
        SamplingParams(detokenize=False)
