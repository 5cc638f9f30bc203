from pdserve.offline.arguments import KVTransferConfig as KVTransferConfig
from pdserve.offline.llm import LLM as LLM
from pdserve.offline.llm import AsyncLLM as AsyncLLM
from pdserve.offline.outputs import RequestOutput as RequestOutput
from pdserve.offline.params import BeamSearchParams as BeamSearchParams
from pdserve.offline.params import GuidedDecodingParams as GuidedDecodingParams
from pdserve.offline.params import LoRARequest as LoRARequest
from pdserve.offline.params import SamplingParams as SamplingParams
from pdserve.offline.params import StructuredOutputsParams as StructuredOutputsParams

__version__: str
