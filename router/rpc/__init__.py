"""gRPC services of the router, which take the same way as HTTP requests: keys, parsing, admission, generation."""
