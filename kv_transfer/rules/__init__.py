"""The rules of the conformance kit, by subject, and the helpers they share."""
