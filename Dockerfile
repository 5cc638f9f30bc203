# One image for all processes: `pdserve router`, `pdserve prefill`, `pdserve decode`. See docs/deploy.md.
#
# TORCH_INDEX   package index for torch, such as that of its CPU builds or of another CUDA version; empty: pip's own settings
# EXTRAS        further extras of pyproject.toml, comma separated, such as nixl

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel -q --no-cache-dir --no-deps -w /wheels .

FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1 HF_HOME=/models
WORKDIR /tmp/build

# Layers that rarely change come first: a compiler for the CPU kernels (and Triton's launchers), torch, other dependencies.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ >/dev/null && rm -rf /var/lib/apt/lists/*

COPY constraints.txt ./
ARG TORCH_INDEX=""
RUN pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch

COPY pyproject.toml ./
ARG EXTRAS=""
# NIXL is installed with --no-deps: it requires a build for each version of CUDA and uses that of torch's; its part for parallel
# experts (0.1 GB) is removed.
RUN export CUDA="$(python -c 'import torch; print((torch.version.cuda or "12").partition(".")[0])')" \
    && python -c 'import os, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extra = p["optional-dependencies"]; \
      names = {"batches", "codecs", "grpc", "kv-events", "otel", "redis", "swagger", "vllm-grpc", *filter(None, os.environ["EXTRAS"].split(","))}; \
      nixl = [*extra["nixl"], "nixl-cu" + os.environ["CUDA"]] if "nixl" in names else []; \
      print(*p["dependencies"], *(line for name in sorted(names - {"nixl"}) for line in extra[name]), sep="\n"); \
      print(*nixl, sep="\n", file=open("alone.txt", "w"))' >requirements.txt \
    && pip install -q -c constraints.txt -r requirements.txt \
    && if grep -q . alone.txt; then pip install -q -c constraints.txt --no-deps -r alone.txt; fi \
    && rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nixl_ep_cu*

RUN useradd --create-home --uid 10001 pdserve && install -d -o pdserve -g pdserve /models /run/gpus /cache
# Kernels that Triton and torch compile at run time: a volume there keeps them.
ENV TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor

COPY scripts/entrypoint /usr/local/bin/
COPY --from=wheel /wheels /tmp/wheels
RUN pip install -q --no-deps /tmp/wheels/*.whl && rm -r /tmp/build /tmp/wheels

USER pdserve
WORKDIR /home/pdserve
# Compile the kernels for the processor that builds the image; on another one, each instance compiles them when it starts.
RUN python -c 'from pdserve.kernels.native import is_available; print("CPU kernels:", is_available())'
EXPOSE 8000 8001
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
