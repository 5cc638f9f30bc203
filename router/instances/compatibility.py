"""Compatibility of instances: whether KV that one of them prefills can be decoded by another one."""

from pdserve.keys import Layout
from pdserve.proto import pdserve_pb2 as pb


def kind_of(hello: pb.Hello) -> tuple[object, ...]:
    """Return what `conflict_between` looks at; the namespace stands for the layout."""
    ids = frozenset(hello.eos_token_ids)
    return hello.namespace, hello.role, hello.convert_kv, hello.allow_inexact, hello.vocab_size, ids


def conflict_between(hello: pb.Hello, other: pb.Hello) -> str:
    """Return why two instances cannot serve together; empty if they can.

    Any prefill instance may be paired with any decode instance, so each of the two must be able to decode what the other one
    has prefilled, if their roles require it.
    """
    if hello.vocab_size != other.vocab_size or set(hello.eos_token_ids) != set(other.eos_token_ids):
        return f"its vocabulary or its EOS tokens differ from those of {other.instance_id}"
    if hello.namespace == other.namespace:
        return ""
    if not Layout.from_message(hello.layout).is_convertible_to(Layout.from_message(other.layout)):
        return f"its weights or its KV layout differ from those of {other.instance_id}"
    for prefill, decode in ((hello, other), (other, hello)):
        if prefill.role == "decode" or decode.role == "prefill":
            continue
        if _format(prefill) != _format(decode) and not decode.convert_kv:
            return (
                f"{prefill.instance_id} has KV blocks of {_describe_format(prefill)}, {decode.instance_id} of "
                f"{_describe_format(decode)}; make them the same, or start {decode.instance_id} with --convert-kv"
            )
        kinds = prefill.layout.numerics, decode.layout.numerics
        if kinds[0] != kinds[1] and prefill.layout.dtype == decode.layout.dtype and not decode.allow_inexact:
            return (
                f"{prefill.instance_id} computes KV as {kinds[0]} and {decode.instance_id} as {kinds[1]}, which round "
                f"otherwise, so tokens would depend on the instance; use processors and versions of one kind, or start "
                f"{decode.instance_id} with --allow-inexact"
            )
    return ""


def _format(hello: pb.Hello) -> tuple[int, str, int]:
    return hello.layout.block_size, hello.layout.dtype, max(1, hello.layout.ranks)


def _describe_format(hello: pb.Hello) -> str:
    block_size, dtype, ranks = _format(hello)
    return f"{block_size} tokens in {dtype}" + (f" on {ranks} ranks" if ranks > 1 else "")
