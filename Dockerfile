# syntax=docker/dockerfile:1.7
# Two images (images/__init__.py says which task runs in which):
#   docker build --target light --build-arg REVISION=$(git rev-parse HEAD) --tag REGISTRY/flytune-light:TAG .
#   docker build --target train --build-arg REVISION=$(git rev-parse HEAD) --tag REGISTRY/flytune-train:TAG .
# Both work in /app, where fast registration unpacks newer code, and import the project from there.
# CUDA's and Python's version stand in images/__init__.py too; a test holds them together.
ARG CUDA=13.0.1
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS light
COPY requirements-light.lock /tmp/
RUN pip install --no-cache-dir --requirement /tmp/requirements-light.lock
RUN useradd --create-home --uid 10001 flytune && install --directory --owner flytune /app
WORKDIR /app
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1
COPY --chown=flytune . .
USER 10001
RUN python -c "import tasks.plan, tasks.prepare, tasks.store, transformers, datasets, pyarrow, matplotlib"
ARG REVISION=unknown
LABEL org.opencontainers.image.title=flytune-light org.opencontainers.image.revision=${REVISION}

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Ubuntu's own archive keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libaio-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*
# Ubuntu 24.04 has Python 3.12 only.
ARG PYTHON
COPY --from=ghcr.io/astral-sh/uv:0.5.1 /uv /usr/local/bin/uv
ENV UV_PYTHON_INSTALL_DIR=/opt/python PATH=/opt/venv/bin:${PATH}
RUN uv venv --seed --python ${PYTHON} --python-preference only-managed /opt/venv
# With dependencies: the CUDA libraries are torch's own pins, and stand in no lock that machines without a GPU use too.
COPY requirements.lock /tmp/
RUN python -m pip install --no-cache-dir --requirement /tmp/requirements.lock
COPY images/compile_deepspeed.sh /tmp/
RUN bash -eu /tmp/compile_deepspeed.sh

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS train
# gcc: Triton compiles launchers when it starts. libaio: DeepSpeed's NVMe offload. ibverbs: NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libaio1t64 libibverbs1 ibverbs-providers ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/venv /opt/venv
RUN useradd --create-home --uid 10001 flytune && install --directory --owner flytune /app
WORKDIR /app
ENV PATH=/opt/venv/bin:${PATH} PYTHONPATH=/app PYTHONUNBUFFERED=1
COPY --chown=flytune . .
USER 10001
RUN python -c "import torch, trl, peft, bitsandbytes, deepspeed, tasks.train, tasks.evaluate, workflows.finetune; \
    from deepspeed.git_version_info import installed_ops as built; \
    wanted = ('cpu_adam', 'fused_adam', 'utils', 'async_io'); \
    assert all(built[name] for name in wanted), built; \
    assert torch.version.cuda, 'torch without CUDA'"
ARG REVISION=unknown
LABEL org.opencontainers.image.title=flytune-train org.opencontainers.image.revision=${REVISION}
