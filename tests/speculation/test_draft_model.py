"""Draft model: it changes no answer, and is right wherever both models agree."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.config import EngineConfig
from pdserve.costs import Costs
from pdserve.counters import series
from pdserve.engine.engine import Engine
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import StepPlan
from pdserve.errors import SetupError
from pdserve.keys import Tokens, token_array
from pdserve.request import Request, SamplingParams
from pdserve.speculation import draft_model
from pdserve.speculation.draft_model import DraftModel
from pdserve.speculation.model_drafter import CATCH_UP_TOKENS, PROBE_STEPS, DraftKV
from tests.engine.speculating import PROMPTS, Runs, changed
from tests.engine.test_speculation import FAULTS

TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "min_p": 0.02}
CHANGED: dict[str, Any] = {
    **DRAWN,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "logit_bias": {7: 4.0, 9: -3.0},
    "bad_words": ((7, 7), (30,)),
    "logprobs": 1,
}
LONG = [(i * 7) % 251 for i in range(2 * CATCH_UP_TOKENS + 40)]

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def alike(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often draws the token that `llama` draws, but not always."""
    return changed(checkpoint("llama", dtype="float32"), tmp_path_factory.mktemp("alike"))


def make_engine(model: Path, draft: Path | None, length: int = 4, **settings: Any) -> Engine:
    """Return an engine whose model another one drafts for, or none."""
    own: dict[str, Any] = {"speculate": "off"}
    if draft is not None:
        own = {"speculate": "draft", "speculative_model": str(draft), "speculative_tokens": length}
    return Engine(
        EngineConfig(**{"model": str(model), "num_blocks": 400, "max_num_batched_tokens": 1024, **own, **settings})
    )


def drafter_of(engine: Engine) -> DraftModel:
    assert isinstance(engine.drafter, DraftModel)
    return engine.drafter


def undrafted(engine: Engine, reason: str) -> float:
    """Return how often a sequence got no drafts for a reason."""
    return drafter_of(engine).counters.get(series("spec_decode_num_without_drafts", reason=reason), 0)


def new_sequence(engine: Engine, prompt: list[int], kind: dict[str, Any], **fields: Any) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **kind})
    return engine.new_sequence("a", Request(prompt=prompt, sampling=sampling, **fields))


def run(engine: Engine, seqs: list[Sequence]) -> list[list[int]]:
    """Return how many tokens each sequence got in each step in which it got some."""
    got: dict[Sequence, list[int]] = {seq: [] for seq in seqs}
    for seq in seqs:
        engine.add(seq)
    while engine.has_work:
        for seq, accepted in engine.step().outcome.items():
            got[seq] += [len(accepted.tokens)] if accepted.tokens else []
            if accepted.finish_reason:
                engine.remove(seq)
        engine.pool.check_integrity()
        if engine.drafter is not None:
            drafter_of(engine).pool.check_integrity()
    if engine.drafter is not None:
        assert drafter_of(engine).pool.num_held == 0 and not drafter_of(engine).followed
    return [*got.values()]


def full_steps(length: int) -> list[int]:
    """Return the tokens of each step of an answer whose drafts are all right."""
    full, rest = divmod(TOKENS - 1, length + 1)
    return [1] + [length + 1] * full + ([rest] if rest else [])


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Runs:
    return Runs(checkpoint("llama", dtype="float32"), request.param)


CASES = [
    ("bfloat16", "same", 4, "none"),
    pytest.param("float32", "alike", 4, "none", marks=pytest.mark.slow),
    ("bfloat16", "alike", 3, "migrated"),
    ("float32", "other", 2, "crowded"),
    ("bfloat16", "alike", 16, "preempted"),
    ("float32", "alike", 4, "swapped"),
    ("bfloat16", "alike", 1, "pipelined"),
    ("float32", "same", 0, "none"),
]


@pytest.mark.parametrize(("runs", "model", "length", "fault"), CASES, indirect=["runs"])
def test_answers_of_every_kind_are_the_same(
    runs: Runs, model: str, length: int, fault: str, checkpoint: Checkpoint, alike: Path
) -> None:
    path = {"same": checkpoint("llama", dtype="float32"), "alike": alike, "other": checkpoint("llama", seed=1)}[model]
    settings = {"speculate": "draft", "speculative_model": str(path), "speculative_tokens": length}
    engine = runs.use("draft", length, **settings, **FAULTS[fault])
    for _ in range(2):  # the second time with warm prefix caches
        assert runs.are_expected(runs.answers(migrate_after=7 if fault == "migrated" else 0))
        drafter_of(engine).pool.check_integrity()
        assert drafter_of(engine).pool.num_held == 0
    assert (engine.scheduler.num_preemptions > 0) == (fault in ("preempted", "swapped"))
    if model != "other" and length > 1:
        assert max(runs.accepted) > 1
    if fault in ("preempted", "swapped"):
        assert undrafted(engine, "room") > 0, "three blocks hold few of the sequences"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [GREEDY, DRAWN, CHANGED], ids=["greedy", "drawn", "changed"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_model_that_drafts_for_itself_is_always_right(
    length: int, kind: dict[str, Any], dtype: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint("llama", dtype="float32")
    engine = make_engine(path, path, length, dtype=dtype)
    seqs = [new_sequence(engine, prompt, kind) for prompt in PROMPTS[:5]]
    assert run(engine, seqs) == [full_steps(length)] * len(seqs)
    assert drafter_of(engine).counters.keys() == {"spec_decode_draft_seconds"}, "none went without"


@pytest.mark.parametrize("left", [1, 2, 3, 40])
def test_no_more_is_drafted_than_the_answer_takes(left: int, checkpoint: Checkpoint) -> None:
    """The last token is none of a draft: a step samples it behind the others."""
    path = checkpoint("llama")
    engine = make_engine(path, path, length=16, dtype="bfloat16")
    seq = new_sequence(engine, PROMPTS[3], {**GREEDY, "max_tokens": 1 + left})
    engine.add(seq)
    engine.step()
    drafts = drafter_of(engine).propose(StepPlan({seq: 1}))
    assert sum(map(len, drafts.values())) == min(16, left - 1)
    engine.remove(seq)


def test_kv_that_is_off_by_one_is_noticed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DraftKV.follow

    def wrong(kept: DraftKV, tokens: Tokens) -> list[bool]:
        found = right(kept, tokens)
        kept.num_computed = min(kept.num_computed + 1, len(tokens) - 1)
        return found

    path = checkpoint("llama", dtype="float32")
    engine = make_engine(path, path, dtype="bfloat16")
    monkeypatch.setattr(DraftKV, "follow", wrong)
    seqs = [new_sequence(engine, prompt, DRAWN) for prompt in PROMPTS[:5]]
    assert run(engine, seqs) != [full_steps(4)] * len(seqs)


@pytest.mark.parametrize("kind", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_drafts_are_what_the_model_would_answer(
    kind: dict[str, Any], checkpoint: Checkpoint, alike: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind right and wrong drafts alike, and where steps had no room for any, its KV is that of the sequence's tokens."""
    engine, alone = (make_engine(*models, dtype="bfloat16") for models in ((checkpoint("llama"), alike), (alike, None)))
    propose, turns, proposals = DraftModel.propose, itertools.count(), list[tuple[list[int], int, list[int]]]()

    def watch(drafter: DraftModel, plan: StepPlan) -> Mapping[Sequence, list[int]]:
        if next(turns) % 3 == 2:
            return {}
        proposed = propose(drafter, plan)
        found = [([*seq.output.tokens], seq.output.num_prompt, drafts) for seq, drafts in proposed.items()]
        proposals.extend(found)
        return proposed

    monkeypatch.setattr(DraftModel, "propose", watch)
    got = run(engine, [new_sequence(engine, prompt, kind) for prompt in PROMPTS[5:9]])
    assert {1, 2, 5} <= {count for counts in got for count in counts}, "drafts are right, partly right and wrong"
    assert len(proposals) > 30
    for tokens, num_prompt, drafts in proposals:
        sampling = SamplingParams(**{"max_tokens": len(tokens) - num_prompt + len(drafts), "ignore_eos": True, **kind})
        request = Request(prompt=tokens[:num_prompt], sampling=sampling)
        seq = alone.new_sequence("a", request, output=tokens[num_prompt:])
        run(alone, [seq])
        assert [*seq.output.tokens[len(tokens) :]] == drafts


def test_a_long_prompt_is_computed_in_parts_and_found_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama")
    engine = make_engine(path, path, dtype="bfloat16")
    behind, largest, step_inputs = list[float](), list[int](), ModelRunner.step_inputs

    def watch(runner: ModelRunner, ids_T: Any, *args: Any) -> Any:
        largest.append(0 if runner is engine.runner else len(ids_T))
        return step_inputs(runner, ids_T, *args)

    monkeypatch.setattr(ModelRunner, "step_inputs", watch)
    for salt in ("", "", "x"):
        got = run(engine, [new_sequence(engine, LONG, GREEDY, salt=salt)])[0]
        behind.append(undrafted(engine, "behind"))
        assert got[:-1][-5:] == [5] * 5
    assert behind == [2, 2, 4], "the second time, its KV is there; that of another's is not"
    assert max(largest) == CATCH_UP_TOKENS
    short = new_sequence(engine, PROMPTS[3], GREEDY)
    together = run(engine, [new_sequence(engine, [3, *LONG], GREEDY), short])
    assert together[1] == full_steps(4), "it does not wait for the other's prompt"


def test_sequences_without_room_go_on_without_drafts(checkpoint: Checkpoint, alike: Path) -> None:
    expected = [new_sequence(plain := make_engine(checkpoint("llama"), None), prompt, GREEDY) for prompt in PROMPTS]
    run(plain, expected)
    engine = make_engine(checkpoint("llama"), alike, num_blocks=60)
    seqs = [new_sequence(engine, prompt, GREEDY) for prompt in PROMPTS]
    got = run(engine, seqs)
    assert [seq.output.tokens for seq in seqs] == [seq.output.tokens for seq in expected]
    assert drafter_of(engine).pool.num_blocks == 15 and undrafted(engine, "room") > 0
    assert max(count for counts in got for count in counts) > 1


def test_who_is_not_computed_gives_way(checkpoint: Checkpoint) -> None:
    """Sequences that the step leaves out lose their KV to those that lack room, and get it back later."""
    path = checkpoint("llama")
    engine = make_engine(path, path, num_blocks=40)  # ten blocks of drafts
    drafter = drafter_of(engine)
    first, second = (new_sequence(engine, [token] * 100, {**GREEDY, "max_tokens": 400}) for token in (1, 2))
    for seq in (first, second):
        engine.add(seq)
    while not (len(first) > 110 and len(second) > 110):
        engine.step()
    held = [seq for seq in (first, second) if drafter.followed[seq].block_ids]
    assert len(held) == 1, "there is room for one of them"
    (other,) = {first, second} - {*held}
    assert drafter.propose(StepPlan({other: 1})).keys() == {other}
    assert not drafter.followed[held[0]].block_ids
    drafter.pool.check_integrity()
    for seq in (first, second):
        engine.remove(seq)
    assert drafter.pool.num_held == 0


def test_a_sequence_longer_than_the_drafts_context_goes_on(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    engine = make_engine(checkpoint("llama"), path, dtype="bfloat16")
    assert run(engine, [new_sequence(engine, [*range(40)], GREEDY)]) == [[1, 5, 5, 5, 5, *[1] * 19]]
    assert undrafted(engine, "room") == 18, "all but the last, behind which there is no room for a draft"


def drafting_by_costs(model: Path, draft: Path, clock: Callable[[], float]) -> Engine:
    """Return an engine whose drafter proposes as many tokens as pay; its rows are cheap."""
    engine = make_engine(model, None, dtype="bfloat16")
    config = EngineConfig(model=str(model), dtype="bfloat16", speculate="draft", speculative_model=str(draft))
    engine.drafter = DraftModel(config, engine.scheduler, cast("ModelRunner", engine.runner), clock)
    engine.scheduler.costs = Costs(decode=(0.01, 1e-4, 0.0))
    return engine


def test_as_many_drafts_as_pay(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    free = drafting_by_costs(path, path, lambda: 0.0)
    got = run(free, [new_sequence(free, PROMPTS[3], {**GREEDY, "max_tokens": 300})])[0]
    assert 3 < got[1] < 9 and max(got) == 9 and sorted(got[1:-1]) == got[1:-1], (
        "the more are right, the more are drafted"
    )
    drawn = drafting_by_costs(path, checkpoint("llama", seed=1), lambda: 0.0)
    drafts = run_counting(drawn, new_sequence(drawn, PROMPTS[3], {**GREEDY, "max_tokens": 300}))
    assert drafts[0] > 3 and sum(drafts) < 60 and all(count <= 1 for count in drafts[20:]), "wrong ones cease"
    assert sum(drafts[20:]) >= 3, "but for one now and then"


def test_a_slow_model_drafts_seldom(checkpoint: Checkpoint) -> None:
    path, ticks = checkpoint("llama"), itertools.count()
    slow = drafting_by_costs(path, path, lambda: float(next(ticks)))
    drafts = run_counting(slow, new_sequence(slow, PROMPTS[3], {**GREEDY, "max_tokens": 300}))
    assert sum(map(bool, drafts[1:])) == len(drafts[1:]) // (PROBE_STEPS + 1) > 2
    assert drafter_of(slow).seconds > 0


def run_counting(engine: Engine, seq: Sequence) -> list[int]:
    """Return the number of drafts in each step of a sequence but the first."""
    engine.add(seq)
    drafts = []
    while engine.has_work:
        for accepted in engine.step().outcome.values():
            drafts.append(accepted.num_drafts)
            if accepted.finish_reason:
                engine.remove(seq)
    return drafts[1:]


@pytest.mark.parametrize("architecture", ["gemma3_mixed", "gemma4", "mistral", "deepseek_v3"])
def test_windows_and_rows_of_other_shapes(architecture: str, checkpoint: Checkpoint) -> None:
    """Layers with a window keep all of their KV here, and have no blocks of their own."""
    path = checkpoint(architecture)
    engine = make_engine(path, path, dtype="bfloat16", num_blocks=600)
    seqs = [new_sequence(engine, prompt, DRAWN) for prompt in ([*range(70)], [*range(9)])]
    assert run(engine, seqs) == [full_steps(4)] * 2


@pytest.mark.parametrize("vocab_size", [257, 272])
def test_vocabularies_may_differ_by_padding(vocab_size: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Tokens that only one of the models has are never proposed, and in a prompt they do no harm."""
    path = changed(checkpoint("llama"), tmp_path, noise=0, vocab_size=vocab_size)
    engine, plain = make_engine(checkpoint("llama"), path), make_engine(checkpoint("llama"), None)
    prompts = [[*range(200, 260)], [259, 3, 258] * 4, PROMPTS[7]]
    answers = []
    for one in (engine, plain):
        seqs = [new_sequence(one, prompt, {**DRAWN, "temperature": 1.5}) for prompt in prompts]
        got = run(one, seqs)
        assert (max(count for counts in got for count in counts) > 1) == (one is engine)
        answers.append([[*seq.output.tokens] for seq in seqs])
    assert answers[0] == answers[1]


def test_what_a_client_has_predicted_comes_first(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"), checkpoint("llama", seed=1), dtype="bfloat16")
    first = new_sequence(engine, PROMPTS[3], GREEDY)
    slow = run(engine, [first])
    request = Request(prompt=PROMPTS[3], sampling=first.sampling)
    again = engine.new_sequence("a", request, prediction=token_array(first.output.generated))
    engine.add(again)
    predicted, right = 0, 0
    while engine.has_work:
        for accepted in engine.step().outcome.values():
            predicted, right = predicted + accepted.num_predicted, right + len(accepted.tokens) - 1
            if accepted.finish_reason:
                engine.remove(again)
    assert predicted == right == 31 and again.output.tokens == first.output.tokens and len(slow[0]) > 30


def test_what_cannot_draft_is_refused_in_a_sentence(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target, other = checkpoint("llama"), shutil.copytree(checkpoint("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: 255 - number for token, number in vocab.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    unlike = changed(target, tmp_path / "unlike", vocab_size=300)
    (unlike / "tokenizer.json").unlink()
    for path, says in {
        other: "has another vocabulary (260 tokens, and",
        unlike: "has another vocabulary (300 tokens, and",
        checkpoint("lfm2"): "has recurrent layers, whose states cannot take drafts back",
        tmp_path / "none": "no such model directory",
    }.items():
        with pytest.raises(SetupError) as error:
            make_engine(target, path)
        assert says in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SetupError, match="no room for two blocks of its KV"):
        make_engine(target, target, num_blocks=4, max_model_len=32)


def test_the_log_names_the_model(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=draft_model.__name__)
    make_engine(checkpoint("llama"), checkpoint("llama", seed=1), length=3)
    assert f"up to 3 drafts a step by {checkpoint('llama', seed=1)}, with 100 blocks of KV" in caplog.text


def test_steps_behind_right_drafts_are_replayed(checkpoint: Checkpoint) -> None:
    """The first one has two tokens of each sequence: the last draft, which has no KV yet, and the token behind it."""
    path = checkpoint("llama", dtype="float32")
    engine = make_engine(path, path, length=3)
    drafter = drafter_of(engine)
    works = list[list[tuple[int, int]]]()
    drafter.on_step = lambda work, _: works.append([*work])
    got = run(engine, [new_sequence(engine, PROMPTS[0], GREEDY | {"max_tokens": 200})])
    behind = [work for work in works if len(work) == 2]
    graphs = drafter.runner.graphs
    assert max(got[0]) == 4 and len(behind) > 40 and graphs is not None
    assert graphs.num_replayed > 0.8 * len(works)
