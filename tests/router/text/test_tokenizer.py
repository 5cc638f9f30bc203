"""Tokenizer and model names, with small tokenizers trained for the tests."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve import model_path
from pdserve.errors import BadRequest, SetupError
from pdserve.model_path import DEMO, resolve_model
from pdserve.router.text.tokenizer import TemplateOptions, Tokenizer, needs_torch


@pytest.mark.parametrize("text", ["", "hello", " hello  world\n", "漢字 👩‍👩‍👧 e\u0301", "\x00"])
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_router_of_the_demo_model_needs_no_torch(tmp_path: Path) -> None:
    """Its tokenizer is read as transformers reads that of any model, which imports torch."""
    assert not needs_torch(DEMO) and needs_torch("some/hub-id") and needs_torch(tmp_path)
    ours, theirs = Tokenizer("demo"), AutoTokenizer.from_pretrained(DEMO)
    assert type(ours._hf) is type(theirs) and ours._hf.init_kwargs == theirs.init_kwargs
    assert ours._rust.to_str() == theirs.backend_tokenizer.to_str()
    code = "import sys; from pdserve.router import server; from pdserve.router.text.tokenizer import Tokenizer; "
    code += "Tokenizer('demo'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_special_tokens_are_skipped_on_demand(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert 0 in ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_vocabulary(tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.special_ids == {0, 1}
    assert fallback_tokenizer.eos_token_ids == frozenset()
    assert fallback_tokenizer.id_to_token(fallback_tokenizer.vocab_size - 1) == "▁▁", "skipped ids count"
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""
    assert tokenizer.id_to_token(0) == "<|end|>"
    assert tokenizer.id_to_token(tokenizer.vocab_size) == ""


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    text = "hello 漢 e\u0301\n\x00<|end|>"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    ids = fallback_tokenizer.encode("the cat 漢")
    assert b"".join(map(fallback_tokenizer.token_bytes, ids)).decode().strip() == "the cat 漢"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_messages_are_rendered_through_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    text = "<|start|>user\nhello<|end|><|start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(1) == 2  # <|start|> as one special token
    bare = tokenizer.render_chat(
        [{"role": "user", "content": "hello"}], options=TemplateOptions(add_generation_prompt=False)
    )
    assert tokenizer.decode(bare, skip_special_tokens=False) == "<|start|>user\nhello<|end|>"


OPTIONS_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort | upper }}{% endif %}{% if style %}{{ style.voice }}{% endif %}"
)
ASKED = [{"role": "user", "content": "hello"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "I say"}]


def test_a_variables_name_is_never_a_pattern(optioned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of a client's is compiled, and kept for the next time."""
    tokenizer, patterns = Tokenizer(optioned), list[Any]()
    compile = re._compile  # type: ignore[attr-defined]

    def noting(pattern: Any, *flags: Any) -> Any:
        patterns.append(pattern)
        return compile(pattern, *flags)

    monkeypatch.setattr(re, "_compile", noting)
    for name in ("enable_thinking" * 10_000, "enable_thinking|style", "", " style", "enable\nthinking"):
        with pytest.raises(BadRequest, match="this model's chat template has no variable"):
            tokenizer.render_chat(ASKED, options=TemplateOptions(variables={name: True}))
    tokenizer.render_chat(ASKED, options=TemplateOptions(variables={"enable_thinking": True}))
    assert all(len(pattern) < 1000 for pattern in patterns if isinstance(pattern, str))


@pytest.fixture
def optioned(tokenizer_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    settings = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": OPTIONS_TEMPLATE})
    )
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (ASKED, TemplateOptions(variables={"enable_thinking": False})),
        (ASKED, TemplateOptions(variables={"reasoning_effort": "high", "style": {"voice": "low"}})),
        (ANSWERED, TemplateOptions(add_generation_prompt=False, continue_final_message=True)),
        (ANSWERED, TemplateOptions(template="{{ messages[-1].content }}: {{ style }}", variables={"style": "x"})),
    ],
)
def test_template_options_do_as_in_transformers(optioned: Path, messages: list[Any], options: TemplateOptions) -> None:
    tokenizer, theirs = Tokenizer(optioned, trust_request_chat_template=True), AutoTokenizer.from_pretrained(optioned)
    expected = theirs.apply_chat_template(
        [dict(message) for message in messages],
        chat_template=options.template or None,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        return_dict=False,
        **options.variables,
    )
    assert tokenizer.render_chat(messages, options=options) == expected


FILLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.mark.parametrize("prefix", ["the quick", "", "<|start|>a"])
def test_the_tokens_around_the_middle(tokenizer_dir: Path, tmp_path: Path, prefix: str) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tokenizer_dir)
    theirs.add_special_tokens({"additional_special_tokens": list(FILLS)})
    theirs.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(tmp_path / "model")
    ids = tokenizer.fill_in_middle(tokenizer.encode(prefix), " fox")
    assert ids == theirs.encode(f"{FILLS[0]}{prefix}{FILLS[1]} fox{FILLS[2]}")


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{{ x }}", "low", {"reasoning_effort": "low"}),
    ],
)
def test_variables_of_a_reasoning_effort(
    tokenizer: Tokenizer, template: str, effort: str, variables: dict[str, Any]
) -> None:
    assert tokenizer.effort_variables(effort, template) == variables


def test_special_tokens_in_template_variables_are_text(optioned: Path) -> None:
    tokenizer = Tokenizer(optioned)
    options = TemplateOptions(variables={"style": {"voice": "<|end|>"}})
    ids = tokenizer.render_chat(ASKED, options=options)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\n<|end|>")
    assert ids.count(0) == 1, "that of the template alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TemplateOptions(variables={"thinking": True}), "has no variable 'thinking'"),
        (TemplateOptions(variables={"messages": []}), "has no variable 'messages'"),
        (TemplateOptions(template="{{ 1 }}"), "needs a router with --trust-request-chat-template"),
        (TemplateOptions(variables={"reasoning_effort": "low", "enable_": True}), "has no variable 'enable_'"),
    ],
)
def test_invalid_template_options(optioned: Path, options: TemplateOptions, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Tokenizer(optioned).render_chat(ASKED, options=options)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ [][3] + 1 }}", "{{ 'a' + 1 }}", "{% for", "{{ ''.__class__.mro() }}"]
)
def test_a_template_of_a_request_may_fail(optioned: Path, template: str) -> None:
    tokenizer = Tokenizer(optioned, trust_request_chat_template=True)
    with pytest.raises(BadRequest, match="this request's chat template"):
        tokenizer.render_chat(ASKED, options=TemplateOptions(template=template))


def test_a_template_may_reject_messages(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(BadRequest, match="rejects these messages: the system message must come first"):
        tokenizer.render_chat(messages)


def test_chat_needs_a_template(fallback_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions"):
        fallback_tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no tokenizer in .*: there is no tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damaged", ["{}", "not json", ""])
def test_a_damaged_tokenizer_is_one_line(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "tokenizer.json").write_text(damaged)
    with pytest.raises(SetupError, match="no usable tokenizer in ") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nope", "/nope", "~/nope-nope", "a/b/c", ""])
def test_a_missing_path_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(SetupError, match="no such model directory"):
        resolve_model(name)


def test_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    monkeypatch.setattr(model_path, "DEMO", tmp_path)
    assert resolve_model("demo") == tmp_path
    monkeypatch.setattr(model_path, "DEMO", tmp_path / "gone")
    with pytest.raises(SetupError, match="bundled demo model is missing"):
        resolve_model("demo")
