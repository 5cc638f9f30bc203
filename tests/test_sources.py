"""Where each source file is tested: in tests/<path>/test_<file>.py, or in what `ELSEWHERE` names; and how long it may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
MOST_LINES, MOST_OF_FUNCTION = 600, 60  # of a file, and of a function's body, without its docstring
PACKAGES = ("pdserve", "router", "kv_transfer", "kernels", "prefill", "decode")
# Test files, by source files or patterns of them; folders of sources are named as below tests/.
ELSEWHERE = {
    # a part: what it belongs to is tested as a whole
    "adapters/layers.py": "adapters/test_slots.py",
    "adapters/ranked_layers.py": "ranks/test_adapters.py",
    "batch/*.py": "batch/test_command.py",
    "control/json_setting.py": "cli/test_flags.py",
    "speculative_config.py": "cli/test_flags.py",
    "engine/architectures/chunked_attention.py": "engine/test_architectures.py",
    "engine/architectures/attention_sinks.py": "engine/test_architectures.py",
    "engine/adapters.py": "adapters/test_slots.py",
    "adapters/slot_table.py": "adapters/test_slots.py",
    "engine/low_bit/*.py": "engine/low_bit/test_checkpoint.py",
    "engine/numerics.py": "engine/test_rows.py",
    "engine/paged_model.py": "engine/test_kv_probe.py",
    "grammars/character_sets.py": "grammars/test_ebnf.py",
    "grammars/*_server.py": "grammars/test_mask_client.py",
    "grammars/mask_worker.py": "grammars/test_mask_client.py",
    "grammars/*.py": "grammars/test_specification.py",
    "instance/reporter.py": "instance/test_instance.py",
    "kv_transfer/batched.py": "kv_transfer/test_threaded.py",
    "kv_transfer/cancellation.py": "decode/test_layout_converter.py",
    "kv_transfer/connectors/nixl/*.py": "kv_transfer/connectors/nixl/test_connector.py",
    "kv_transfer/forwarding.py": "kv_transfer/test_guarded.py",
    "kv_transfer/progress.py": "kv_transfer/test_bench.py",
    "router/dialects/*/*.py": "router/dialects/test_*.py router/api/test_messages.py router/api/test_responses.py",
    "router/dispatch/operations.py": "router/dispatch/test_dispatcher.py router/dispatch/test_epochs.py",
    "router/instances/arrivals.py": "router/instances/test_control_server.py",
    "router/instances/compatibility.py": "router/instances/test_fleet.py",
    "router/instances/controller_lease.py": "tools/autoscaler/test_router_client.py",
    "router/rpc/*.py": "router/rpc/test_vllm_engine.py",
    "router/scheduling/output_faults.py": "router/dispatch/test_invalid_outputs.py",
    "router/telemetry/gen_ai.py": "router/telemetry/test_tracing.py",
    "router/telemetry/metrics.py": "deploy/test_grafana.py",
    "router/text/parsers/*.py": "router/text/parsers/test_*.py router/api/test_tools.py",
    "router/web/endpoint.py": "router/web/test_app.py",
    "router/web/tls_listener.py": "router/web/test_http_protocol.py",
    "tools/*/*.py": "tools/*/test_*.py test_slo.py",
    "tools/load_config.py": "integration/test_bench.py",
    "tools/machine.py": "tools/planner/test_command.py",
    # split: by what it does
    "decode/decoder.py": "roles/test_decoder.py roles/test_choices.py roles/test_windows.py",
    "decode/target_blocks.py": "decode/test_layout_converter.py",
    "engine/cpu_fusion/fused_layers.py": "engine/cpu_fusion/test_fused_*.py",
    "engine/cpu_fusion/row_products.py": "engine/test_rows.py",
    "engine/memory/blocks.py": "engine/memory/test_block_pool.py",
    "engine/model_runner.py": "engine/test_packed.py engine/test_rows.py engine/test_step_costs.py",
    "lines/*.py": "lines/test_lines.py",
    "output.py": "instance/test_outputs.py",
    "prefill/prefiller.py": "roles/test_prefiller.py",
    # kernels: each implementation is compared with another
    "engine/gpu/*.py": "engine/test_step_costs.py kernels/gpu/test_on_gpu.py",
    "kernels/*.py": "kernels/test_*.py",
    "kernels/gpu/*.py": "kernels/gpu/test_compilation.py kernels/gpu/test_on_gpu.py",
    # kit: run against connectors that are right, and some that are wrong
    "kv_transfer/check_command.py": "kv_transfer/test_conformance.py",
    "kv_transfer/connectors/memory.py": "kv_transfer/test_conformance.py",
    "kv_transfer/rules/*.py": "kv_transfer/test_conformance.py",
    # processes: it needs several
    "__main__.py": "integration/test_up.py",
    "cli/*.py": "integration/test_up.py integration/test_startup_errors.py integration/test_ray.py",
    "engine/parallel/*.py": "ranks/test_engine.py",
    "instance/*.py": "integration/test_moves.py integration/test_probes.py integration/test_zmq_events.py",
    "interop/grpc_*.py": "router/rpc/test_server.py",
    "interop/vllm_kv_events.py": "router/kv_events/test_subscriber.py",
    "interop/zmq_publisher.py": "integration/test_zmq_events.py",
    "launchers/ray_*.py": "integration/test_ray.py",
    "offline/*.py": "integration/test_offline.py",
    "ranks/*.py": "ranks/test_engine.py ranks/test_followers.py integration/test_ranks.py",
    "kv_transfer/tickets.py": "ranks/test_followers.py",
    "router/dialects/embeddings.py": "integration/test_embeddings.py",
    "router/kv_events/sources.py": "integration/test_zmq_events.py",
    # values: names and types that others use, and functions of a few lines
    "beam_search.py": "engine/test_beams.py integration/test_beam_search.py",
    "config.py": "cli/test_flags.py",
    "settings.py": "cli/test_flags.py",
    "engine/checkpoint_loader.py": "engine/test_checkpoint.py",
    "errors.py": "test_docs.py",
    "kv_transfer/fence.py": "kv_transfer/test_blocks.py",
    "lifetime.py": "integration/test_up.py",
    "model_path.py": "router/text/test_tokenizer.py",
    "pooling.py": "engine/test_features.py",
    "router/api/answers.py": "router/api/test_openapi.py",
    "router/api/field_texts.py": "router/api/test_openapi.py",
    "router/backend.py": "router/api/test_generation.py",
    "router/routed_request.py": "router/api/test_requests.py",
    "sizes.py": "kv_transfer/test_url.py",
}


def untested() -> list[Path]:
    """Return the source files without a test file of their own, by their paths below tests/."""
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):  # which does not follow the links in pdserve/
            path = file.relative_to(ROOT / "pdserve" if package == "pdserve" else ROOT)
            if file.name != "__init__.py" and not (TESTS / path.with_name(f"test_{path.name}")).exists():
                found.append(path)
    return found


def is_of(path: Path, pattern: str) -> bool:
    """Return whether a pattern stands for a file; `*` is part of one name."""
    return Path("/", path).match(f"/{pattern}")


def test_each_source_file_is_tested_in_its_file_or_in_one_that_is_named() -> None:
    missing = [str(path) for path in untested() if not any(is_of(path, one) for one in ELSEWHERE)]
    assert not missing, f"write tests/<path>/test_<file>.py, or name in ELSEWHERE the tests of {missing}"


def test_what_is_tested_elsewhere_is_there() -> None:
    paths = untested()
    stale = [pattern for pattern in ELSEWHERE if not any(is_of(path, pattern) for path in paths)]
    assert not stale, f"these files are gone, or have tests of their own: {stale}"
    gone = {name for names in ELSEWHERE.values() for name in names.split() if not [*TESTS.glob(name)]}
    assert not gone, f"there are no tests {sorted(gone)}"


def source_files() -> list[Path]:
    """Return all files of Python and C++ but those that protoc writes."""
    folders = (*PACKAGES, "benchmarks", "scripts", "tests", "examples")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp"))
    return [path for path in files if "_pb2" not in path.name]


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return path.read_bytes().count(b"\n")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module, also those in classes, functions and conditions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # of which most of a file consists
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions(child)


def test_no_file_and_no_function_is_too_long() -> None:
    files = source_files()
    too_long = [f"{path.relative_to(ROOT)}: {count} lines" for path in files if (count := lines_of(path)) > MOST_LINES]
    for path in files:
        if path.suffix == ".py" and TESTS not in path.parents:
            for node in functions(ast.parse(path.read_text())):
                if body_lines(node) > MOST_OF_FUNCTION:
                    too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {body_lines(node)} lines")
    assert len(files) > 900 and not too_long, f"divide, or move out what has a name of its own: {too_long}"
