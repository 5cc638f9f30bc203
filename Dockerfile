# One image for all processes: `pdserve router`, `pdserve prefill`, `pdserve decode`. See docs/deploy.md.
#
# TORCH_INDEX   package index for torch, such as that of its CPU builds or of another CUDA version; empty: pip's own settings
# EXTRAS        further extras of pyproject.toml, comma separated, such as nixl

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel -q --no-cache-dir --no-deps -w /wheels .

FROM python:3.11-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /tmp/build

# Layers that rarely change come first: a compiler for the CPU kernels, torch, other dependencies.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ >/dev/null && rm -rf /var/lib/apt/lists/*

COPY constraints.txt ./
ARG TORCH_INDEX=""
RUN python -m venv --without-pip /opt/pdserve \
    && pip --python /opt/pdserve/bin/python install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch

COPY pyproject.toml ./
ARG EXTRAS=""
# NIXL is installed with --no-deps: it requires a build for each version of CUDA and uses that of torch's; its part for parallel
# experts (0.1 GB) is removed. So is what nothing imports: headers, tests, tools and symbols, without CUDA also Triton.
RUN export PATH="/opt/pdserve/bin:$PATH" CUDA="$(/opt/pdserve/bin/python -c 'import torch; print((torch.version.cuda or "").partition(".")[0])')" \
    && python -c 'import os, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extra = p["optional-dependencies"]; \
      names = {"batches", "codecs", "grpc", "kv-events", "otel", "redis", "swagger", "vllm-grpc", *filter(None, os.environ["EXTRAS"].split(","))}; \
      nixl = [*extra["nixl"], "nixl-cu" + (os.environ["CUDA"] or "12")] if "nixl" in names else []; \
      print(*p["dependencies"], *(line for name in sorted(names - {"nixl"}) for line in extra[name]), sep="\n"); \
      print(*nixl, sep="\n", file=open("alone.txt", "w"))' >requirements.txt \
    && pip --python /opt/pdserve/bin/python install -q -c constraints.txt -r requirements.txt \
    && if grep -q . alone.txt; then pip --python /opt/pdserve/bin/python install -q -c constraints.txt --no-deps -r alone.txt; fi \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && rm -rf nixl_ep_cu* torch/test torch/include torch/share \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find numpy sympy networkx -type d -name tests -prune -exec rm -r {} + \
    && strip --strip-unneeded torch/lib/*.so zstandard/*.so uvloop/*.so \
    && if [ -z "$CUDA" ]; then rm -rf triton triton-*.dist-info; fi

COPY --from=wheel /wheels /tmp/wheels
RUN pip --python /opt/pdserve/bin/python install -q --no-deps /tmp/wheels/*.whl \
    && /opt/pdserve/bin/python -m pdserve.kernels.prebuilt /opt/pdserve/kernels

FROM python:3.11-slim
ENV PATH="/opt/pdserve/bin:$PATH" PYTHONUNBUFFERED=1 HF_HOME=/models XDG_CACHE_HOME=/cache PDSERVE_KERNELS=/opt/pdserve/kernels
# Kernels that Triton and torch compile at run time: a volume there keeps them.
ENV TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
RUN useradd --create-home --uid 10001 pdserve && install -d -o pdserve -g pdserve /models /run/gpus /cache

COPY --from=build /opt/pdserve /opt/pdserve
# A compiler for Triton's launchers, or where no CPU kernels were built beforehand.
RUN if python -c 'import sys, torch; from pathlib import Path; sys.exit(not torch.version.cuda and any(Path("/opt/pdserve/kernels").iterdir()))'; \
    then apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ >/dev/null && rm -rf /var/lib/apt/lists/*; fi
COPY scripts/entrypoint /usr/local/bin/

USER pdserve
WORKDIR /home/pdserve
EXPOSE 8000 8001
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
