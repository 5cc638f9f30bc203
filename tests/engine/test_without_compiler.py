"""Instances import and build models without torch's compiler, which can be loaded afterwards."""

import subprocess
import sys

SERVING = """
import sys
from pdserve.cli.fork_server import load
for _ in load():
    pass
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


def run(program: str) -> str:
    """Run a program to its successful end, and return what it logs."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_engine_serves_without_the_compiler_which_can_be_used_afterwards() -> None:
    run(SERVING)


def test_what_needs_more_than_decorators_gets_the_compiler() -> None:
    run(OTHER_TORCH)


def test_a_version_that_needs_all_of_torch_is_imported_with_it() -> None:
    assert "is imported with all of torch: this version needs" in run(OTHER_TRANSFORMERS)
