"""Text for the demo model: facts, stories, chats, questions about a fact stated earlier in the prompt, calls and JSON.

Everything is drawn from one `random.Random`, so the same seed gives the same text.
"""

from .document import EOS, SPECIAL_TOKENS, TURN_END, TURN_START, Document
from .facts import draw_facts
from .mixture import SKILLS, draw_document, draw_long_document, draw_skill, skill_case, sums_document
from .retrieval import RetrievalCase, retrieval_cases
from .words import CAPITALS

__all__ = [
    "CAPITALS",
    "EOS",
    "SKILLS",
    "SPECIAL_TOKENS",
    "TURN_END",
    "TURN_START",
    "Document",
    "RetrievalCase",
    "draw_document",
    "draw_facts",
    "draw_long_document",
    "draw_skill",
    "retrieval_cases",
    "skill_case",
    "sums_document",
]
