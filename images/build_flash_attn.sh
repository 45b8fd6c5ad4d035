#!/bin/bash -eu
# Builds FlashAttention 2 into /tmp/wheels: its package has only sources, which take an hour or more; each of MAX_JOBS compilers may
# need several GB. One command a line: images/__init__.py passes the lines to ImageSpec. Nothing is built if FLASH_ATTN is empty.
mkdir -p /tmp/wheels
# A100 (whose code A10G and L4 run), H100, B200 and newer; FlashAttention 2 does not support the T4.
export FLASH_ATTN_CUDA_ARCHS='80;90;100' FLASH_ATTENTION_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-4}" NVCC_THREADS=2
test -z "${FLASH_ATTN}" || python -m pip download --no-cache-dir --no-deps --no-build-isolation --no-binary flash-attn --dest /tmp "flash-attn==${FLASH_ATTN}"
test -z "${FLASH_ATTN}" || tar -xzf /tmp/flash_attn-*.tar.gz -C /tmp
# torch's headers need C++20.
test -z "${FLASH_ATTN}" || sed -i 's/-std=c++17/-std=c++20/' /tmp/flash_attn-*/setup.py
test -z "${FLASH_ATTN}" || python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /tmp/wheels /tmp/flash_attn-*/
rm -rf /tmp/flash_attn-*
