"""The HTTP application: endpoints, middleware, authentication, admission, the live page."""
