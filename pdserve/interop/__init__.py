"""Protocols of other systems at routers and instances: gRPC, and vLLM's KV events and metrics.

In reading order: grpc_server, grpc_health, grpc_calls, vllm_metrics, vllm_kv_events, zmq_publisher.
"""
