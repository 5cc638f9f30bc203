# One image for every part: `pdserve router`, `pdserve prefill`, `pdserve decode`. See docs/deploy.md.
#
# TORCH_INDEX   a package index to take torch from, for its build for CPUs or for another CUDA; empty: pip's own settings

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel -q --no-cache-dir --no-deps -w /wheels .

FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1 HF_HOME=/models
WORKDIR /tmp/build

# What rarely changes comes first: torch, then the other dependencies, then pdserve itself.
COPY constraints.txt ./
ARG TORCH_INDEX=""
RUN pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch

COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      >requirements.txt \
    && pip install -q -c constraints.txt -r requirements.txt

RUN useradd --create-home --uid 10001 pdserve && install -d -o pdserve -g pdserve /models /run/gpus

COPY scripts/entrypoint /usr/local/bin/
COPY --from=wheel /wheels /tmp/wheels
RUN pip install -q --no-deps /tmp/wheels/*.whl && rm -r /tmp/build /tmp/wheels

USER pdserve
WORKDIR /home/pdserve
EXPOSE 8000 8001
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
