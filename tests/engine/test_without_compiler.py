"""Instances import and build models without torch's compiler, which can be loaded afterwards."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVING = """
import sys
assert "pdserve.instance.process" in sys.modules, "not imported before the fork"
from pdserve.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.request import Request, SamplingParams

before = {*sys.modules}
engine = Engine(EngineConfig(model="demo", num_blocks=64))
seq = engine.new_sequence("", Request(prompt=[5] * 20, sampling=SamplingParams(max_tokens=40, ignore_eos=True)))
engine.add(seq)
while seq.output.num_generated < 40:
    engine.step()
assert engine.runner.graphs.num_replayed, "no step was replayed"
heavy = {"triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"} & {*sys.modules}
assert not heavy, heavy
assert not (late := {"sympy", "torch.fx.experimental.symbolic_shapes"} & ({*sys.modules} - before)), late

import torch
assert torch.distributed.is_available()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert torch._dynamo.is_compiling() is False
"""

OTHER_TORCH = """
import sys
import torch
from pdserve.engine.without_compiler import without_compiler

with without_compiler():
    import torch._dynamo
    assert torch._dynamo.disable(len) is len and "torch._dynamo.config" not in sys.modules
    assert torch._dynamo.config.recompile_limit > 0  # no decorator
    assert sys.modules["torch._dynamo"].disable(len) is not len
assert "torch._dynamo" in sys.modules
"""

OTHER_TRANSFORMERS = """
import sys
import torch

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.masking_utils" and not torch.distributed.is_available():
            raise ImportError("this version needs torch.distributed")

sys.meta_path.insert(0, Finder())
import pdserve.engine.without_compiler
assert "transformers.masking_utils" not in sys.modules and torch.distributed.is_available()
import pdserve.instance.process
from transformers import LlamaForCausalLM
import transformers.masking_utils
"""


def test_an_engine_serves_without_the_compiler_which_can_be_used_afterwards(pdserve: Callable[..., Any]) -> None:
    done = pdserve("-c", SERVING)
    assert done.returncode == 0, done.stderr


def test_what_needs_more_than_decorators_gets_the_compiler(pdserve: Callable[..., Any]) -> None:
    done = pdserve("-c", OTHER_TORCH)
    assert done.returncode == 0, done.stderr


def test_a_version_that_needs_all_of_torch_is_imported_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_TRANSFORMERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is imported with all of torch: this version needs" in done.stderr
