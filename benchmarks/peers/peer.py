"""Another engine, in an environment of its own (`install`), asked over pipes by ../engine.py, or by HTTP by ../pd.py.

    python peer.py run NAME CHECKPOINT THREADS DTYPE DEVICE CONTEXT QUANTIZATION
        Loads the engine and prints a line when that is done. Then each line of input, `{"prompts": [[id, …], …],
        "output_tokens": n}`, is generated greedily and answered with one, `{"steps": […], "cpu": […], "first": i}`, as
        `Timing` of ../engine.py has them. CONTEXT is what the longest prompt and its output have together. QUANTIZATION is
        `none`, or `int8` or `int4` where that engine can: of the layers, in groups of 32; the head has 8 bits then.
    python peer.py serve NAME CHECKPOINT THREADS DTYPE CONTEXT PORT SIDE_PORT ROLE
        Becomes its OpenAI server on that port of 127.0.0.1, with a model named `model`. ROLE is `kv_producer` or
        `kv_consumer` for one half of a disaggregated pair, which meets the other half by SIDE_PORT; or empty.
    python peer.py convert NAME CHECKPOINT QUANTIZATION
        Writes the checkpoint as that engine wants it, beside the other.

Imports nothing of ours: the peer's environment has the peer's packages.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SEQS, STEP_TOKENS = 32, 2048
CONTEXT = 2048  # at least, so that what vLLM has compiled serves most tasks
CACHE_GIB = 3


class Clock:
    """Seconds from `start` to the end of each step, by the wall and by the processor; the step in which all had begun."""

    def start(self) -> None:
        self.steps: list[float] = []
        self.cpu: list[float] = []
        self.first: int | None = None
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def step(self, *, all_began: bool = True) -> None:
        """A step is over; `all_began`: every sequence has a token."""
        self.steps.append(time.perf_counter() - self._wall)
        self.cpu.append(time.process_time() - self._processor)
        if self.first is None and all_began:
            self.first = len(self.steps) - 1


Run = Callable[[list[list[int]], int, Clock], None]


def run_openvino(path: Path, threads: int, dtype: str, device: str, context: int, quantization: str) -> Run:
    """OpenVINO GenAI, continuous batching."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short, "INFERENCE_NUM_THREADS": threads}
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = STEP_TOKENS, SEQS
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GIB, False
    pipeline = genai.ContinuousBatchingPipeline(converted(path, "openvino", quantization), scheduler, "CPU", properties)

    def run(prompts: list[list[int]], output_tokens: int, clock: Clock) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_tokens
        config.do_sample, config.ignore_eos = False, True
        ids = [ov.Tensor(np.array([prompt])) for prompt in prompts]
        clock.start()
        handles = [pipeline.add_request(i, tensor, config) for i, tensor in enumerate(ids)]
        waiting = handles
        while pipeline.has_non_finished_requests():
            pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
            clock.step(all_began=not waiting)
        for handle in handles:
            (output,) = handle.read_all()
            assert len(output.generated_ids) == output_tokens

    return run


def convert_openvino(path: Path, target: Path, quantization: str) -> None:
    """Low bits as NNCF has them: int4 in groups, int8 with a scale per row. The head and the embeddings have 8 bits."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    low: dict[str, Any] = {
        "none": {"load_in_8bit": False},
        "int8": {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=True)},
        "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0)},
    }
    OVModelForCausalLM.from_pretrained(path, export=True, compile=False, **low[quantization]).save_pretrained(target)


def run_llama_cpp(path: Path, threads: int, dtype: str, device: str, context: int, quantization: str) -> Run:
    """llama.cpp through its C interface, all sequences in one batch; KV is float16, as it is by default."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    file = str(converted(path, "llama_cpp", quantization)).encode()
    model = lib.llama_model_load_from_file(file, lib.llama_model_default_params())
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    contexts: dict[tuple[int, int], Any] = {}

    def room(seqs: int, tokens: int) -> Any:
        """Every sequence has a stream of its own: what one may hold is the same share for all."""
        share = max(CONTEXT if seqs == 1 else CONTEXT // 4, -(-tokens // 256) * 256)
        if (seqs, share) not in contexts:
            params = lib.llama_context_default_params()
            params.n_seq_max, params.n_ctx = seqs, seqs * share
            params.n_batch, params.n_threads, params.n_threads_batch = max(STEP_TOKENS, share), threads, threads
            contexts[seqs, share] = lib.llama_init_from_model(model, params)
        return contexts[seqs, share]

    def decode(ctx: Any, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """The most probable successor of each (id, position, sequence, wanted) that is wanted."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, seq, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        assert lib.llama_decode(ctx, batch) == 0
        lib.llama_batch_free(batch)
        rows = [lib.llama_get_logits_ith(ctx, i) for i, (*_, wanted) in enumerate(tokens) if wanted]
        return [int(np.ctypeslib.as_array(row, shape=(vocabulary,)).argmax()) for row in rows]

    def run(prompts: list[list[int]], output_tokens: int, clock: Clock) -> None:
        ctx = room(len(prompts), len(prompts[0]) + output_tokens)
        lib.llama_memory_clear(lib.llama_get_memory(ctx), False)
        clock.start()
        last: list[int] = []
        at_once = max(1, STEP_TOKENS // len(prompts[0]))
        for first in range(0, len(prompts), at_once):
            some = range(first, min(first + at_once, len(prompts)))
            last += decode(ctx, [(x, i, s, i == len(prompts[s]) - 1) for s in some for i, x in enumerate(prompts[s])])
            clock.step(all_began=len(last) == len(prompts))
        for i in range(1, output_tokens):
            last = decode(ctx, [(x, len(prompts[s]) + i - 1, s, True) for s, x in enumerate(last)])
            clock.step()

    return run


def convert_llama_cpp(path: Path, target: Path, quantization: str) -> None:
    """A GGUF without a vocabulary: ids go in, ids come out. Norms are float32, as llama.cpp has them."""
    import gguf
    import numpy as np

    config = json.loads((path / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for file in path.glob("*.safetensors"):
        data = np.memmap(file, mode="r")
        start = 8 + int(data[:8].view(np.uint64)[0])
        for name, tensor in json.loads(data[8:start].tobytes()).items():
            if name == "__metadata__":
                continue
            first, end = (start + offset for offset in tensor["data_offsets"])
            assert tensor["dtype"] in ("BF16", "F32")
            values = data[first:end].view(np.uint16 if tensor["dtype"] == "BF16" else np.float32)
            values, kind = values.reshape(tensor["shape"]), None
            if values.dtype == np.uint16 and values.ndim == 1:
                values = (values.astype(np.uint32) << 16).view(np.float32)
            elif values.dtype == np.uint16:
                values, kind = values.view(np.uint8), gguf.GGMLQuantizationType.BF16
            found = names.get_name(name, try_suffixes=(".weight",))
            assert found is not None, name
            if kind is not None and quantization != "none":
                kind = gguf.GGMLQuantizationType[
                    "Q4_0" if quantization == "int4" and found.startswith("blk.") else "Q8_0"
                ]
                values = gguf.quantize((values.view(np.uint16).astype(np.uint32) << 16).view(np.float32), kind)
            writer.add_tensor(found, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_vllm(path: Path, threads: int, dtype: str, device: str, context: int, quantization: str) -> Run:
    """vLLM's build for CPUs, with torch.compile; its scheduler and its worker in this process."""
    os.environ.update(vllm_environment(path), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=max(CONTEXT, context),
        max_num_seqs=SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
    ).llm_engine

    def run(prompts: list[list[int]], output_tokens: int, clock: Clock) -> None:
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True, detokenize=False)
        clock.start()
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        began: set[str] = set()
        while engine.has_unfinished_requests():
            began |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
            clock.step(all_began=len(began) == len(prompts))

    return run


def serve_vllm(path: Path, dtype: str, context: int, port: str, side_port: str, role: str) -> NoReturn:
    """vLLM's own server, or with a role one of the two that its NixlConnector joins through the host's memory."""
    os.environ.update(vllm_environment(path), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.update(UCX_TLS="tcp,shm,cma,self", UCX_NET_DEVICES="lo")
    # An address of its own, behind the same port as ever: the port is part of the key of compiled code, the host is not.
    high, low = divmod(int(side_port), 256)
    os.environ.update(VLLM_NIXL_SIDE_CHANNEL_HOST=f"127.1.{high}.{low}")
    arguments = ["--host", "127.0.0.1", "--port", port, "--model", str(path), "--served-model-name", "model"]
    arguments += ["--dtype", dtype, "--max-model-len", str(max(CONTEXT, context)), "--max-num-seqs", str(SEQS)]
    arguments += ["--max-num-batched-tokens", str(STEP_TOKENS), "--disable-uvicorn-access-log"]
    if role:
        if importlib.util.find_spec("nixl") is None:
            sys.exit("nixl is not in vLLM's environment: install it again")
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        arguments += ["--kv-transfer-config", json.dumps(transfer | {"kv_connector_module_path": "patient_nixl"})]
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments])


def vllm_environment(path: Path) -> dict[str, str]:
    return {
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_CACHE_ROOT": str(converted(path, "vllm")),  # of compiled code, for the next time
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def run_transformers(path: Path, threads: int, dtype: str, device: str, context: int, quantization: str) -> Run:
    """`generate` over a static batch."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model = loaded.to(device).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_tokens: int, clock: Clock) -> None:
        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            """Called after each token."""
            clock.step()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        clock.start()
        ids = torch.tensor(prompts, device=device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            eos_token_id=None,
            stopping_criteria=transformers.StoppingCriteriaList([stamp]),
        )

    return run


def preload() -> None:
    """Runs this program again with the libraries that vLLM asks to have loaded first; tcmalloc is not on every machine."""
    runtime = Path(sys.prefix) / "lib/libiomp5.so"
    if str(runtime) not in os.environ.get("LD_PRELOAD", ""):
        libraries = [runtime, *Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4")]
        os.environ["LD_PRELOAD"] = ":".join(map(str, libraries))
        os.execv(sys.executable, [sys.executable, *sys.argv])


def converted(path: Path, name: str, quantization: str = "none") -> Path:
    return path.with_name(f"{path.name}-{name}" + f"-{quantization}" * (quantization != "none"))


def main(action: str, name: str, checkpoint: str, *arguments: str) -> None:
    path = Path(checkpoint)
    if action == "convert":
        target = converted(path, name, *arguments)
        unfinished = target.with_name(f"{target.name}-unfinished")
        globals()[f"convert_{name}"](path, unfinished, *arguments)
        unfinished.rename(target)
        return
    threads, dtype, *options = arguments
    if name == "vllm":
        preload()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print what they like
    if action == "serve":
        globals()[f"serve_{name}"](path, dtype, int(options[0]), *options[1:])
    device, context, quantization = options
    run, clock = globals()[f"run_{name}"](path, int(threads), dtype, device, int(context), quantization), Clock()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        run(task["prompts"], task["output_tokens"], clock)
        print(json.dumps({"steps": clock.steps, "cpu": clock.cpu, "first": clock.first}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
