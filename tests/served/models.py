"""Artifacts that are served, trained here by Flytune, and the files that are made of them."""

import json
import os
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from demo import base_model
from flytune.records.contents import CONTENTS
from flytune.selftest import tiny_model
from tests.served import environments
from tests.support.tiny import tiny_recipe, write_pairs

_LORA = {"name": "lora", "r": 8, "lora_alpha": 16}
_TRAINED = {"training.learning_rate": 1e-2, "training.max_steps": 12}
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "training.max_steps": 12},
    "lora": {"method": _LORA, **_TRAINED},
    "qlora": {"method": _LORA | {"name": "qlora"}, "model.dtype": "bfloat16", **_TRAINED},
    "tokens": {"method": _LORA, "model.extra_special_tokens": ["<|call|>", "<|result|>"], **_TRAINED},
    "experts": {"method": _LORA | {"experts": True}, **_TRAINED},
    "template": {
        "method": _LORA,
        "data.chat_template": "alpaca",
        **_TRAINED,
    },
    "smollm2": {"method": _LORA, "training.max_steps": 6},
    "bfloat16": {"method": _LORA, "model.dtype": "bfloat16", **_TRAINED},
}
"""Changes of the tiny recipe, by the names of runs."""


def flytune(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of Flytune; its output is kept."""
    command = [sys.executable, "-m", "flytune.cli", *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _done(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-3000:]}")


def _done_flytune(*words: str) -> None:
    done = flytune(*words)
    if done.returncode:
        raise RuntimeError(f"flytune {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}")


class Models:
    """Bases, artifacts and files in a folder, each made when it is first asked for."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder, self.environment = folder, environment
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def published(self) -> Path:
        """Folder of SmolLM2-135M-Instruct, of `make demo`."""
        return base_model.convert(self.folder / "smollm2-135m-instruct")

    @cached_property
    def base(self) -> Path:
        """Folder of a Llama of random weights; `mixture` beside it is a mixture of experts.

        The tokenizer of both is SmolLM2's: llama.cpp's converter takes those alone that it knows.
        """
        base = self.folder / "tiny"
        if not base.is_dir():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.published)
            tokenizer.model_max_length = 1024
            # On a CPU vLLM 0.32.0 has no kernel of attention for heads of 16; llama.cpp knows no Qwen3-MoE
            # with layers without experts, and no published one has them.
            fields = {"head_dim": 32, "mlp_only_layers": []}
            tiny_model.write_mixture(self.folder / "mixture", tokenizer, **fields)
            tiny_model.random_model(tokenizer).save_pretrained(base)
            tokenizer.save_pretrained(base)
        return base

    def base_of(self, name: str) -> Path:
        """Return the base of a run."""
        if name in ("smollm2", "bfloat16"):
            return self.published
        return self.base.with_name("mixture") if name == "experts" else self.base

    def artifact(self, name: str) -> Path:
        """Return the artifact of a run."""
        out = self.folder / "artifacts"
        if not (stored := sorted(out.glob(f"{name}-*"))):
            rows = write_pairs(self.folder / "rows.jsonl", 64)
            recipe = tiny_recipe(self.base_of(name), rows, {"name": name, **RECIPES[name]})
            file = self.folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            _done_flytune("run", str(file), "--out", str(out))
            stored = sorted(out.glob(f"{name}-*"))
        return stored[-1]

    def merged(self, name: str) -> Path:
        """Return the folder of an artifact's merged model."""
        out = self.folder / f"{name}-merged"
        if not out.is_dir():
            _done_flytune("merge", str(self.artifact(name)), "--out", str(out))
        return out

    def halved(self, name: str) -> Path:
        """Return a copy of an adapter with half of its lora_alpha."""
        out = self.folder / f"{name}-halved"
        if not out.is_dir():
            shutil.copytree(self.artifact(name), out)
            config = json.loads((out / "adapter_config.json").read_bytes())
            config["lora_alpha"] /= 2
            (out / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return out

    def with_other_tokenizer(self, model: Path) -> Path:
        """Return a copy of a complete model whose tokenizer has two words exchanged."""
        out = self.folder / f"{model.name}-other-tokenizer"
        if not out.is_dir():
            # Without the list of an artifact's files, which has their hashes.
            shutil.copytree(model, out, ignore=shutil.ignore_patterns(CONTENTS))
            content = json.loads((out / "tokenizer.json").read_bytes())
            words = content["model"]["vocab"]
            words["Ġcapital"], words["Ġwinter"] = words["Ġwinter"], words["Ġcapital"]
            (out / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return out

    @cached_property
    def other_template(self) -> Path:
        """File of a chat template with other words."""
        out = self.folder / "other.jinja"
        out.write_text(
            "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}"
        )
        return out

    def gguf(self, model: Path, outtype: str) -> Path:
        """Return the GGUF file of a complete model or an artifact, by `flytune gguf` and llama.cpp's own
        converter."""
        out = self.folder / f"{model.name}-{outtype}.gguf"
        if not out.is_file():
            *environment, python, script = environments.converter(self.environment, "convert_hf_to_gguf.py")
            # `flytune gguf` starts one file.
            program = self.folder / "converter"
            program.write_text(f'#!/bin/sh\nexec {" ".join(environment)} {python} {script} "$@"\n')
            program.chmod(0o755)
            words = ["gguf", str(model), "--out", str(out), "--outtype", outtype]
            _done_flytune(*words, "--converter", str(program))
        return out

    def quantized(self, model: Path, kind: str) -> Path:
        """Return a GGUF file of fewer bits, by llama-quantize."""
        out = self.folder / f"{model.name}-{kind}.gguf"
        if not out.is_file():
            program = environments.llama_cpp(self.environment) / "build/bin/llama-quantize"
            _done([str(program), str(self.gguf(model, "f32")), str(out), kind])
        return out

    def lora_gguf(self, name: str) -> Path:
        """Return an adapter as GGUF, by the command of its card."""
        out = self.folder / f"{name}-lora.gguf"
        if not out.is_file():
            command = environments.converter(self.environment, "convert_lora_to_gguf.py")
            words = ["--base", str(self.base_of(name)), "--outfile", str(out), "--outtype", "f32"]
            _done([*command, str(self.artifact(name)), *words])
        return out
