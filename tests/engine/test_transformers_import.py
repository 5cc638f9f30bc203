"""What an instance imports of torch and transformers."""

import subprocess
import sys

PROGRAM = """
import sys
import pdserve.engine.transformers_import
import pdserve.instance.process
from transformers import LlamaForCausalLM, LlamaConfig
heavy = {"sympy", "triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"} & {*sys.modules}
assert not heavy, heavy
import torch
assert torch.distributed.is_available()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert torch._dynamo.__name__ in sys.modules and torch._dynamo.is_compiling() is False
"""


def test_the_compiler_is_not_imported_and_can_be_used_afterwards() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
