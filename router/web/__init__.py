"""The HTTP application: endpoints, middleware, authentication, admission and the live page."""
