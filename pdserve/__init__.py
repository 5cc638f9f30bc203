"""pdserve: disaggregated prefill/decode LLM serving. Read docs/architecture.md for the way in."""

__version__ = "0.1.0"
