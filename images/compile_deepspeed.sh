#!/bin/bash -eu
# Compiles DeepSpeed's operators into the installed version, once instead of in each pod. One command a line: images/__init__.py
# passes the lines to ImageSpec. Needs nvcc of torch's CUDA version, a C++ compiler, libaio's headers.
python -m pip download --no-cache-dir --no-deps --no-build-isolation --no-binary deepspeed --dest /tmp "$(python -m pip freeze | grep ^deepspeed==)"
tar -xzf /tmp/deepspeed-*.tar.gz -C /tmp
# For the CPU of every GPU cloud (AVX2), not for the build machine's: a pod on an older CPU fails with an illegal instruction.
find /tmp/deepspeed-*/ -name builder.py -exec sed -i 's/-march=native/-march=x86-64-v3/; s/-D__AVX512__/-D__AVX256__/' {} +
# A build machine has no GPU to detect: set DS_ACCELERATOR, and the capabilities of the GPUs of shapes.yaml and newer.
export DS_ACCELERATOR=cuda TORCH_CUDA_ARCH_LIST='7.5;8.0;8.6;8.9;9.0;10.0+PTX'
export DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1 DS_BUILD_UTILS=1 DS_BUILD_AIO=1
python -m pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall /tmp/deepspeed-*/
rm -rf /tmp/deepspeed-*
