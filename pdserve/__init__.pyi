from pdserve.offline.llm import LLM as LLM
from pdserve.offline.llm import AsyncLLM as AsyncLLM
from pdserve.offline.outputs import RequestOutput as RequestOutput
from pdserve.offline.params import SamplingParams as SamplingParams

__version__: str
