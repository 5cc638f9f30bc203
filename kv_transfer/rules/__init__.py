"""The rules of the conformance kit."""
