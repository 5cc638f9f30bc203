"""Text for the demo model: facts, stories, short chats, and questions about a fact stated earlier in the prompt.

Everything is drawn from one `random.Random`, so the same seed gives the same text.
"""

from .document import EOS, SPECIAL_TOKENS, TURN_END, TURN_START, Document
from .facts import draw_facts
from .mixture import draw_document, draw_long_document, sums_document
from .retrieval import RetrievalCase, retrieval_cases
from .words import CAPITALS

__all__ = [
    "CAPITALS",
    "EOS",
    "SPECIAL_TOKENS",
    "TURN_END",
    "TURN_START",
    "Document",
    "RetrievalCase",
    "draw_document",
    "draw_facts",
    "draw_long_document",
    "retrieval_cases",
    "sums_document",
]
