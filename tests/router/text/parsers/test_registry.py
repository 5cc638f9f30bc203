"""The choice of parsers: by name, by chat template, or of another package."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve import plugins
from pdserve.errors import SetupError
from pdserve.router.text.parsers import registry
from pdserve.router.text.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, choose_parsers

# What tells the published templates apart → names of the parsers of calls and of reasoning.
TEMPLATES = {
    "{{ messages }}": (None, None),
    "{{ tools }}<tool_call>": ("hermes", None),  # Qwen 2.5
    "{{ tools }}<tool_call>{% if enable_thinking %}<think>\n\n</think>": ("hermes", "qwen3"),
    "{{ tools }}<tool_call><function=f><parameter=p>": ("qwen3_coder", None),
    '{{ tools }}{"name": f, "parameters": {}}<function=f>': ("llama3_json", None),
    "{{ tools }}[func_name1(params_name1=params_value1)]": ("pythonic", None),
    "{{ tools }}[TOOL_CALLS]": ("mistral", None),
    "{{ tools }}[TOOL_CALLS][ARGS][THINK]": ("mistral", "mistral"),
    "{{ tools }}<tool_call><arg_key></arg_key><think>{{ enable_thinking }}": ("glm45", "glm45"),
    "{{ tools }}<|tool_call_begin|><|tool_call_argument_begin|>": ("kimi_k2", None),
    "{{ tools }}<|tool_call_begin|><|tool_call_argument_begin|><think>": ("kimi_k2", "kimi_k2"),
    "{{ tools }}<｜Assistant｜><｜tool▁sep｜>\n```json</think>": ("deepseek_v3", "deepseek_r1"),
    "{{ tools }}{% if thinking %}<｜Assistant｜><｜tool▁sep｜><think></think>": ("deepseek_v31", "deepseek_v3"),
    "{{ tools }}<|tool_call|><think></think><response></response>": ("granite", "granite"),
    "{{ tools }}<|channel|>analysis<|message|>": ("openai", "openai_gptoss"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_chooses(template: str) -> None:
    chosen = choose_parsers("auto", "auto", template, template, {})
    calls, reasoning = TEMPLATES[template]
    assert chosen.tools is (TOOL_PARSERS[calls] if calls else None)
    assert chosen.reasoning is (REASONING_PARSERS[reasoning] if reasoning else None)


def test_names() -> None:
    chosen = choose_parsers("kimi_k2", "none", "{{ tools }}<tool_call>", "<think>", {})
    assert (chosen.tools, chosen.reasoning) == (TOOL_PARSERS["kimi_k2"], None)


@pytest.mark.parametrize(
    ("calls", "reasoning", "message"),
    [
        (
            "nope",
            "auto",
            "--tool-call-parser 'nope' is not known; the names are auto, none, deepseek_v3, deepseek_v31, glm",
        ),
        ("auto", "hermes", "--reasoning-parser 'hermes' is not known; the names are auto, none, deepseek_r1, "),
    ],
)
def test_an_unknown_name_lists_the_names(calls: str, reasoning: str, message: str) -> None:
    with pytest.raises(SetupError) as error:
        choose_parsers(calls, reasoning, "", "", {})
    assert message in str(error.value)


def test_parsers_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "pdserve.router.text.parsers.json_calls"
    targets = {"mine": f"{here}:HermesParser", "missing": f"{here}:Nope", "wrong": "json:JSONDecoder"}
    info = tmp_path / "parsers-1.dist-info"
    info.mkdir()
    lines = [f"[{registry.TOOL_GROUP}]", *(f"{name} = {target}" for name, target in targets.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    plugins.names.cache_clear()
    assert choose_parsers("mine", "none", "", "", {}).tools is TOOL_PARSERS["hermes"]
    with pytest.raises(SetupError, match="cannot be imported"):
        choose_parsers("missing", "none", "", "", {})
    with pytest.raises(SetupError, match="is not a subclass of ToolParser"):
        choose_parsers("wrong", "none", "", "", {})
    with pytest.raises(SetupError, match=", mine, missing, "):
        choose_parsers("nope", "none", "", "", {})
