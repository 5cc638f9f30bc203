"""/v1/messages, Anthropic's API.

In reading order: endpoints, schemas, conversion.
"""
