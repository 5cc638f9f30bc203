"""Reasoning in a chat: whether the prompt has begun it, its budget, and the grammar that begins after it."""

from enum import Enum

from pdserve.errors import BadRequest, InvalidParameter
from pdserve.reasoning import MAX_BUDGET, ReasoningSpan
from pdserve.router.api.schemas import ChatBody
from pdserve.router.text.parsers.reasoning import ReasoningParser
from pdserve.router.text.parsers.tool_parser import ToolParser
from pdserve.router.text.tokenizer import Tokenizer

END_TOKENS = 32  # of the prompt, in which its last tag is


class ReasoningState(Enum):
    """State of the reasoning at the end of a prompt."""

    ABSENT = "the model does not reason, as far as the router knows"
    UNDECIDED = "the output may begin with reasoning"
    OPEN = "the output begins inside of reasoning"
    CLOSED = "the prompt has ended the reasoning, or it continues an answer"


def reasoning_state(body: ChatBody, prompt: list[int], tokenizer: Tokenizer) -> ReasoningState:
    """Return the state of the reasoning at the end of a body's prompt."""
    parser = tokenizer.parsers.reasoning
    if parser is None:
        return ReasoningState.ABSENT
    if body.continue_final_message:
        content = body.messages[-1].content
        parts = content if isinstance(content, list) else ()
        text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in parts)
        last_open, last_close = (max(map(text.rfind, tags)) for tags in (parser.OPEN, parser.CLOSE))
        return ReasoningState.OPEN if last_open > last_close else ReasoningState.CLOSED
    end = tokenizer.decode(prompt[-END_TOKENS:], skip_special_tokens=False)
    if parser.opens(end):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if parser.closes(end) else ReasoningState.UNDECIDED


def reasoning_span(
    body: ChatBody,
    state: ReasoningState,
    tokenizer: Tokenizer,
    *,
    has_grammar: bool,
    may_reason: bool = False,
    calls: type[ToolParser] | None = None,
) -> ReasoningSpan | None:
    """Return how instances tell reasoning from the answer; None if they need not.

    They need to for a budget, and for a grammar, which begins after the reasoning. With `may_reason` it also allows
    reasoning, as text, and applies from the beginning where that is not known to be in the output, or a call may end it.
    Without a grammar, the tokens with which `calls` begin end reasoning: its closing must not be forced into a call.

    Raises:
        BadRequest: there is a budget, but the model does not reason, its tags are not tokens, or it may call strict tools
            while it reasons.
    """
    budget, parser = body.thinking_token_budget, tokenizer.parsers.reasoning
    if budget is not None and not 0 <= budget <= MAX_BUDGET:
        message = f"thinking_token_budget must be from 0 to {MAX_BUDGET}, or -1 for any number, not {budget}"
        raise InvalidParameter("thinking_token_budget", message)
    if budget is not None and (parser is None or not _are_tokens(parser, tokenizer)):
        reason = "this model does not reason" if parser is None else "this model's tokenizer has no tokens that end it"
        message = f"thinking_token_budget limits reasoning, but {reason}; leave it out"
        raise BadRequest(message, kind="unsupported_parameter", param="thinking_token_budget")
    if budget is not None and has_grammar and may_reason and parser is not None and parser.ENDS:
        message = (
            "thinking_token_budget cannot be combined with strict tools, which this model may call while it reasons; "
            "leave out one of the two"
        )
        raise BadRequest(message, kind="unsupported_parameter", param="thinking_token_budget")
    if parser is None or state is ReasoningState.CLOSED or (budget is None and not has_grammar):
        return None
    if budget is None and may_reason and (state is ReasoningState.UNDECIDED or parser.ENDS):
        return None
    if not _are_tokens(parser, tokenizer) or (has_grammar and parser.OPTIONAL and state is ReasoningState.UNDECIDED):
        return None  # a grammar applies from the beginning on
    close = _encode(parser.CLOSE[0], tokenizer)
    further = () if has_grammar else _further_ends(parser, calls, tokenizer)
    return ReasoningSpan(
        start=() if state is ReasoningState.OPEN else _encode(parser.OPEN[0], tokenizer),
        ends=(close, *further),
        closing=_encode(parser.CLOSING, tokenizer) if parser.CLOSING else close,
        budget=budget,
        is_required=has_grammar,
    )


def _further_ends(
    parser: type[ReasoningParser], calls: type[ToolParser] | None, tokenizer: Tokenizer
) -> list[tuple[int, ...]]:
    """Return the tokens that end reasoning besides its tag."""
    tags = [tag for tag in parser.ENDS if _are_tokens(parser, tokenizer, tag)]
    if calls is not None and not calls.SAYS_REASONING:
        tags += [tag for tag in (*calls.BEGINS, *calls.SILENT) if tokenizer.token_id(tag) is not None]
    return [_encode(tag, tokenizer) for tag in dict.fromkeys(tags)]


def _are_tokens(parser: type[ReasoningParser], tokenizer: Tokenizer, text: str = "") -> bool:
    """Return whether the tokenizer has the tags as tokens, so that their ids do not depend on what surrounds them.

    The tags are those in `text`, by default those around reasoning.
    """
    text = text or parser.OPEN[0] + parser.CLOSE[0] + parser.CLOSING
    return all(tokenizer.token_id(tag) is not None for tag in parser.TAGS if tag in text)


def _encode(tag: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(tag, add_special_tokens=False))
