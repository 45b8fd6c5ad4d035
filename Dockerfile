# syntax=docker/dockerfile:1.7
# Two images (images/__init__.py says which task runs in which):
#   docker build --target light --build-arg REVISION=$(git rev-parse HEAD) --tag REGISTRY/flytune-light:TAG .
#   docker build --target train --build-arg REVISION=$(git rev-parse HEAD) --tag REGISTRY/flytune-train:TAG .
#   ... --build-arg FLYTE2=2.12.1 puts in Flyte 2's SDK, for flyte2/ (docs/flyte2.md).
#   ... --build-arg VLLM=0.32.0 puts in an environment with vLLM, /opt/vllm, for objective.engine: vllm (not built here yet).
#   ... --build-arg FLASH_ATTN= leaves FlashAttention out (it compiles for an hour or more); --build-arg EFA=1.47.0 puts AWS's network in.
# No stage gets a secret. Both images work in /app and import the project from there. In pods fast registration unpacks newer code in
# /code, which comes first (flytune/pods/security.py); where pods have a writable root, over /app.
# images/__init__.py has the same versions; a test compares them.
ARG CUDA=13.0.1
ARG PYTHON=3.11
ARG FLASH_ATTN=2.8.3.post2
ARG LIGER_KERNEL=0.8.5

FROM python:${PYTHON}-slim-bookworm AS light
# Debian's own archive keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
COPY requirements-light.lock /tmp/
RUN pip install --no-cache-dir --requirement /tmp/requirements-light.lock
# Flyte 2's SDK, which pins another rich-click than flytekit takes by itself: its packages are of the lock that has both.
ARG FLYTE2=
COPY requirements-dev.lock /tmp/
RUN test -z "${FLYTE2}" || pip install --no-cache-dir --constraint /tmp/requirements-dev.lock "flyte==${FLYTE2}"
# Bytecode of the standard library, which this base leaves out, and of packages: a pod's user cannot store it, and would compile
# what it imports in every process. Some files are for other versions of Python.
RUN python -m compileall -qq -j 0 /usr/local/lib || true
RUN useradd --create-home --uid 10001 flytune && install --directory --owner flytune /app
WORKDIR /app
COPY images/sitecustomize.py /opt/site/
COPY --chmod=755 images/fast_execute.py /opt/bin/pyflyte-fast-execute
ENV PATH=/opt/bin:${PATH} PYTHONPATH=/app:/opt/site PYTHONUNBUFFERED=1
COPY --chown=flytune . .
USER 10001
RUN python -m compileall -q /app
# Flyte gives containers arguments but no command. As process 1, Python gets no signal without a handler, so none while it imports. -s: in pods
# of rows, which share a process namespace, tini is not process 1.
ENTRYPOINT ["tini", "-s", "--"]
RUN python -c "import images.fast_execute, tasks.approval, tasks.base_model, tasks.checkpoint, tasks.input_data, tasks.harness, tasks.infer, \
    tasks.merge, tasks.plan, tasks.prepare, tasks.promote, tasks.refresh, tasks.report, tasks.store, tasks.sweep, transformers, datasets, pyarrow, matplotlib, lm_eval"
ARG REVISION=unknown
LABEL org.opencontainers.image.title=flytune-light org.opencontainers.image.revision=${REVISION}

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS tools
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

# Only the packages that FlashAttention is compiled with: it is not compiled again when another line of the lock changes.
FROM tools AS pins
COPY requirements.lock /tmp/
RUN grep --extended-regexp '^(torch|setuptools|packaging|psutil|ninja|numpy)==' /tmp/requirements.lock > /tmp/torch.lock

FROM tools AS flash-attn
COPY --from=pins /tmp/torch.lock images/build_flash_attn.sh /tmp/
ARG FLASH_ATTN
ARG MAX_JOBS=4
RUN test -z "${FLASH_ATTN}" || python -m pip install --no-cache-dir --requirement /tmp/torch.lock
RUN bash -eu /tmp/build_flash_attn.sh

FROM tools AS build
# With dependencies: torch pins the CUDA libraries, which are in no lock because machines without a GPU use the locks too.
COPY requirements.lock /tmp/
RUN python -m pip install --no-cache-dir --requirement /tmp/requirements.lock
COPY images/compile_deepspeed.sh /tmp/
RUN bash -eu /tmp/compile_deepspeed.sh
COPY --from=flash-attn /tmp/wheels /tmp/wheels
RUN find /tmp/wheels -name '*.whl' -exec python -m pip install --no-cache-dir --no-deps {} +
# Without dependencies: they are torch and its Triton.
ARG LIGER_KERNEL
RUN python -m pip install --no-cache-dir --no-deps liger-kernel==${LIGER_KERNEL}
ARG FLYTE2=
COPY requirements-dev.lock /tmp/
RUN test -z "${FLYTE2}" || python -m pip install --no-cache-dir --constraint /tmp/requirements-dev.lock "flyte==${FLYTE2}"
# An environment of its own: vLLM pins other versions of torch and transformers. Without the argument an empty folder.
ARG VLLM=
RUN mkdir -p /opt/vllm && { test -z "${VLLM}" || { python -m venv /opt/vllm \
    && /opt/vllm/bin/python -m pip install --no-cache-dir "vllm==${VLLM}"; }; }
# As in the light image.
RUN python -m compileall -qq -j 0 /opt/python /opt/venv || true

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS train
# gcc: Triton compiles launchers when it starts. libaio: DeepSpeed's NVMe offload. ibverbs: NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libaio1t64 libibverbs1 ibverbs-providers ca-certificates tini \
    && rm -rf /var/lib/apt/lists/*
# libfabric and NCCL's plugin (aws-ofi-nccl), from AWS's installer; the driver is the node's. Without them NCCL uses TCP.
ARG EFA=
# hadolint ignore=DL3003,DL3008
RUN test -z "${EFA}" || ( apt-get update && apt-get install --yes --no-install-recommends curl \
    && curl --fail --location --output /tmp/efa.tar.gz "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA}.tar.gz" \
    && tar -xzf /tmp/efa.tar.gz -C /tmp && cd /tmp/aws-efa-installer \
    && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
    && ldconfig && rm -rf /tmp/efa.tar.gz /tmp/aws-efa-installer /var/lib/apt/lists/* )
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/vllm /opt/vllm
RUN useradd --create-home --uid 10001 flytune && install --directory --owner flytune /app
WORKDIR /app
COPY images/sitecustomize.py /opt/site/
COPY --chmod=755 images/fast_execute.py /opt/bin/pyflyte-fast-execute
ENV PATH=/opt/bin:/opt/venv/bin:${PATH} PYTHONPATH=/app:/opt/site PYTHONUNBUFFERED=1
COPY --chown=flytune . .
USER 10001
RUN python -m compileall -q /app
ENTRYPOINT ["tini", "-s", "--"]
ARG FLASH_ATTN
RUN python images/check_train.py "${FLASH_ATTN}" \
    && python -c "import trl, peft, tasks.train, tasks.evaluate, tasks.selftest, workflows.finetune"
ARG REVISION=unknown
LABEL org.opencontainers.image.title=flytune-train org.opencontainers.image.revision=${REVISION}
