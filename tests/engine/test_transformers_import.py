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


OTHER_VERSION = """
import sys
import torch

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.masking_utils" and "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].config.cache_size_limit += 1

sys.meta_path.insert(0, Finder())
import pdserve.engine.transformers_import
sys.meta_path.pop(0)
assert "transformers.masking_utils" not in sys.modules and torch.distributed.is_available()
import pdserve.instance.process
from transformers import LlamaForCausalLM
import transformers.masking_utils
"""


def test_a_version_that_needs_the_compiler_is_imported_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is imported with torch's compiler" in done.stderr
