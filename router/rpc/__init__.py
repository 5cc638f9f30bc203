"""gRPC services of the router, which take the same way as HTTP requests: keys, parsing, admission, generation.

In reading order: server, service, vllm_engine, generate_request, generate_response.
"""
