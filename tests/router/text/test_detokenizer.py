"""Detokenizer, StopMatcher and TextStream: the pieces together equal the whole, however the input is split."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.output import Output
from pdserve.router.text.detokenizer import Detokenizer, StopMatcher, TextStream
from pdserve.router.text.tokenizer import Tokenizer
from tests.cpu_time import cpu_seconds

TEXT = "naïve 漢字 👩‍👩‍👧 e\u0301 \U0001f1e9\U0001f1ea नमस्ते ok"
SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the byte-level tokenizer's single-byte ids for the data."""
    ids = {tokenizer.id_to_token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [ids[table[byte]] for byte in data]


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    out = pieces(tokenizer, byte_ids(tokenizer, TEXT.encode()))
    assert "".join(out) == TEXT
    assert "\ufffd" not in "".join(out)
    assert out[-1] == ""
    assert [piece for piece in out if piece] == list(TEXT), "each character comes with its last byte"


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_that_a_parser_needs_are_replaced(tokenizer: Tokenizer, skips: bool) -> None:
    start, end = tokenizer.encode("<|start|><|end|>")
    ids = [*tokenizer.encode("the 漢"), start, end, *tokenizer.encode("字")]
    cut = [*ids[:-1], start]  # inside of a character
    for tokens, text in ((ids, "the 漢[start]{}字"), (cut, "the 漢[start]{}\ufffd[start]")):
        for size in (1, 3, len(tokens)):
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips, replaced={start: "[start]"})
            parts = [detokenizer.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
            assert "".join([*parts, detokenizer.flush()]) == text.format("" if skips else "<|end|>")


def test_byte_fallback_and_trimmed_spaces(fallback_tokenizer: Tokenizer) -> None:
    for text in ["▁the▁cat", "▁▁▁the", "▁a▁漢字▁👩", "漢"]:
        ids = fallback_tokenizer.encode(text)
        out = pieces(fallback_tokenizer, ids)
        assert "".join(out) == fallback_tokenizer.decode(ids)
        assert "\ufffd" not in "".join(out)


def test_ids_that_the_vocabulary_skips_add_nothing(fallback_tokenizer: Tokenizer) -> None:
    """A client may allow only such ones, of which a window would grow without end."""
    detokenizer = Detokenizer(fallback_tokenizer)
    cat = fallback_tokenizer.token_id("▁cat")
    assert cat is not None
    assert [detokenizer.push([one]) for one in (cat, *[1] * 100, cat)] == ["cat", *[""] * 100, " cat"]
    assert len(detokenizer._window) < 10 and not detokenizer.has_rest


def test_ids_in_any_order_equal_decode(tokenizer: Tokenizer) -> None:
    @SHARED
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=60))
    def check(ids: list[int]) -> None:
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    check()


def test_bytes_in_any_order_equal_decode(tokenizer: Tokenizer) -> None:
    """Mostly invalid UTF-8 in long runs, where windows are shortened."""
    fragments = st.sampled_from(
        [b"\xe6", b"\xe6\xbc", b"\xf0\x9f", b"\x80", b"\xff", "😀".encode(), "漢".encode(), b"a"]
    )

    @SHARED
    @given(st.lists(st.tuples(fragments, st.integers(1, 40)), max_size=10))
    def check(runs: list[tuple[bytes, int]]) -> None:
        data = b"".join(fragment * times for fragment, times in runs)
        out = "".join(pieces(tokenizer, byte_ids(tokenizer, data)))
        assert out == data.decode(errors="replace")

    check()


def test_text_through_byte_fallback_equals_decode(fallback_tokenizer: Tokenizer) -> None:
    @SHARED
    @given(st.text("▁ahtecw漢😀é", max_size=30))
    def check(text: str) -> None:
        ids = fallback_tokenizer.encode(text)
        assert "".join(pieces(fallback_tokenizer, ids)) == fallback_tokenizer.decode(ids)

    check()


def test_ids_without_a_token_add_no_text(fallback_tokenizer: Tokenizer) -> None:
    """They are not context either: the space of the next token is kept."""
    cat = fallback_tokenizer.encode("▁a")
    ids = [*cat, 1, *cat, fallback_tokenizer.vocab_size, *cat]
    assert "".join(pieces(fallback_tokenizer, ids)) == fallback_tokenizer.decode(ids) == "a a a"


def test_an_incomplete_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    out = pieces(tokenizer, byte_ids(tokenizer, b"a\xf0\x9f"))
    assert out == ["a", "", "", "\ufffd"]


def test_special_tokens_inside_a_character_do_not_break_it(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(tokenizer, "漢".encode())
    assert "".join(pieces(tokenizer, [first, 0, *rest, 1])) == "漢"


def test_a_long_run_of_invalid_bytes_keeps_a_short_window(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    lengths = []
    for token_id in byte_ids(tokenizer, b"\xe6") * 1000:
        detokenizer.push([token_id])
        lengths.append(len(detokenizer._window))
    assert max(lengths) <= 64


@pytest.mark.slow
def test_a_long_stop_string_costs_no_more_at_each_token_than_a_short_one() -> None:
    """Sixteen of them took a token 2 ms when the text went on as one of them."""

    def seconds(length: int) -> float:
        matcher = StopMatcher(["a" * length + "b", *(f"{i}{'c' * length}" for i in range(15))])
        return cpu_seconds(lambda: [matcher.push("aaaa") for _ in range(2000)])

    assert seconds(255) < 4 * seconds(2)


def match_stops(stops: list[str], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for part in parts:
        out += matcher.push(part)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["END"], ["one ", "E", "N", "D two"], ("one ", "END")),
        (["END"], ["one ", "E", "N", "E", "ND"], ("one EN", "END")),
        (["END"], ["one EN"], ("one EN", None)),
        (["aab"], list("aaab"), ("a", "aab")),
        (["bc", "abcd"], list("abcd"), ("a", "bc")),
        (["\n\n", "."], ["a\n", "b. c"], ("a\nb", ".")),
        (["x", "xy"], ["axy"], ("a", "x")),
        (["d", "bcd"], ["abcd"], ("a", "bcd")),
        (["abcd", "bc"], ["abcd"], ("a", "bc")),
        ([], ["a", "b"], ("ab", None)),
    ],
)
def test_stop_strings(stops: list[str], parts: list[str], expected: tuple[str, str | None]) -> None:
    assert match_stops(stops, parts) == expected


def test_the_stop_string_may_be_included() -> None:
    assert match_stops(["END"], ["one E", "ND two"], include=True) == ("one END", "END")


def test_only_a_possible_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(part) for part in ["see ", "E", "N", "O", "N"]] == ["see ", "", "", "ENO", "N"]


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("ab", max_size=3)))
def test_the_first_completed_stop_string_ends_the_text(stops: list[str], parts: list[str]) -> None:
    """Compare with the definition: read character by character and stop when the text read ends with a stop string."""
    text = "".join(parts)
    complete = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    end, matched = min(complete, key=lambda hit: (hit[0], -len(hit[1])), default=(len(text), None))
    assert match_stops(stops, parts) == (text[: end - len(matched or "")], matched)
    if matched is not None:
        assert match_stops(stops, parts, include=True) == (text[:end], matched)


def run_stream(stream: TextStream, chunks: list[Output]) -> tuple[str, list[int]]:
    texts, ids = [], []
    for chunk in chunks:
        text, token_ids = stream.push(chunk)
        texts.append(text)
        ids += token_ids
        if stream.finish_reason is not None:
            break
    return "".join(texts), ids


def test_a_stop_string_cuts_the_tokens_of_its_chunk(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abcdef")
    stream = TextStream(tokenizer, ["cd"])
    assert run_stream(stream, [Output(ids, "length")]) == ("ab", ids[:4])
    assert stream.finish_reason == "stop"


def test_a_stop_token_gives_no_text(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abc")
    chunks = [Output(ids[:2]), Output(ids[2:], "stop")]
    assert run_stream(TextStream(tokenizer), chunks) == ("ab", ids)
    assert run_stream(TextStream(tokenizer, include_stop=True), chunks) == ("abc", ids)


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abEN\xe6")
    stream = TextStream(tokenizer, ["END"])
    assert run_stream(stream, [Output(ids, "length")]) == ("abEN\ufffd", ids)
    assert stream.finish_reason == "length"


def test_stop_strings_are_ignored_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"abab")
    assert run_stream(TextStream(tokenizer, ["b"]), [Output(ids, "length")])[0] == "a"
    assert run_stream(TextStream(tokenizer, ["b"], min_tokens=2), [Output(ids, "length")])[0] == "aba"


def test_chunks_of_any_size_give_the_same_text(tokenizer: Tokenizer) -> None:
    @SHARED
    @given(st.lists(st.integers(2, tokenizer.vocab_size - 1), min_size=1, max_size=30), st.integers(1, 30))
    def check(ids: list[int], size: int) -> None:
        parts = [Output(ids[i : i + size]) for i in range(0, len(ids), size)]
        parts[-1] = Output(parts[-1].token_ids, "length")
        for stops in (["e", "th"], []):
            whole = run_stream(TextStream(tokenizer, stops), [Output(ids, "length")])
            assert run_stream(TextStream(tokenizer, stops), parts) == whole
            assert stops or whole == (tokenizer.decode(ids), ids)

    check()
