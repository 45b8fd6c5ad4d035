"""Stand-in for vLLM's server: the part of its API that draws answers and takes weights, by a model of
transformers.

It is a program, started as vLLM's environment would start it (`interpreter`). tests/served starts the real
one. Variables of the test say what it notes (NOTES) and what goes wrong (FAULT).
"""

import argparse
import json
import os
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

NOTES, FAULT = "VLLM_TEST_NOTES", "VLLM_TEST_FAULT"
"""Variables with the file of the requests, a line each, and with the name of a fault."""


def interpreter(folder):
    """Write a program that takes the place of the Python of vLLM's environment, and return its path."""
    program = folder / "vllm-python"
    # Behind `-m MODULE`.
    program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -P {Path(__file__)} "$@"\n')
    program.chmod(0o755)
    return program


def noted(file):
    """Return the requests that a server has noted: pairs of a path and its content."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


class Served:
    """The model with its adapters, and what is asked of it."""

    def __init__(self, options):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.options, self.lock = options, threading.Lock()
        self.fault = os.environ.get(FAULT, "")
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        overrides = json.loads(options.hf_overrides)
        self.load = lambda folder: AutoModelForCausalLM.from_pretrained(
            folder, dtype=options.dtype, **overrides
        ).eval()
        self.base, self.model, self.version = self.load(options.model), None, "default"
        self.adapters, self.drawn, self.is_asleep = {}, 0, False

    def answer(self, path, content):
        """Return the status and content of an answer."""
        name = urlsplit(path).path.rpartition("/")[2]
        self.note(path, content)
        if not hasattr(self, f"do_{name}"):
            return 404, {"detail": "Not Found"}
        with self.lock:
            return getattr(self, f"do_{name}")(content)

    def note(self, path, content):
        if note := os.environ.get(NOTES):
            with Path(note).open("a") as file:
                file.write(json.dumps([path, content]) + "\n")

    def do_health(self, content):
        return 200, b""

    def do_models(self, content):
        base = {
            "id": self.options.served_model_name,
            "parent": None,
            "max_model_len": self.options.max_model_len,
        }
        others = [{"id": name, "parent": base["id"], "max_model_len": None} for name in self.adapters]
        return 200, {"object": "list", "data": [base, *others]}

    def do_tokenize(self, content):
        return 200, {"tokens": self.tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]}

    def do_weight_info(self, content):
        return 200, {"weight_version": self.version}

    def do_update_weight_version(self, content):
        self.version = content["new_version"]
        return 200, {"success": True}

    def do_collective_rpc(self, content):
        assert content["method"] == "reload_weights"
        if self.fault != "stale":
            self.base = self.load(content["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def do_reset_prefix_cache(self, content):
        return 200, {"success": True}

    def do_sleep(self, content):
        assert self.options.enable_sleep_mode
        self.is_asleep = True
        return 200, {"status": "sleeping", "level": 1}

    def do_wake_up(self, content):
        self.is_asleep = False
        return 200, {"status": "awake", "tags": None}

    def do_load_lora_adapter(self, content):
        from peft import PeftModel

        assert self.options.enable_lora
        name, folder = content["lora_name"], content["lora_path"]
        if self.fault == "loading":
            os._exit(7)
        if self.fault == "stale" and self.model is not None:
            self.adapters[name] = next(iter(self.model.peft_config))
        elif self.model is None:
            self.model = PeftModel.from_pretrained(self.base, folder, adapter_name=name).eval()
            self.adapters[name] = name
        else:
            self.model.load_adapter(folder, adapter_name=name)
            self.adapters[name] = name
        return 200, b"Success: LoRA adapter added successfully."

    def do_unload_lora_adapter(self, content):
        del self.adapters[content["lora_name"]]
        return 200, b"Success: LoRA adapter removed successfully."

    def do_completions(self, content):
        assert not self.is_asleep
        self.drawn += 1
        if self.fault == "drawing" and self.drawn == 5:
            os._exit(9)
        name = content["model"]
        if name in self.adapters:
            self.model.set_adapter(self.adapters[name])
            model = self.model
        elif name == self.options.served_model_name:
            model = self.base
        else:
            return 404, {"error": {"message": f"The model `{name}` does not exist.", "code": 404}}
        tokens, log_probs, reason = self.draw(model, content)
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": log_probs},
            "finish_reason": reason,
        }
        return 200, {"object": "text_completion", "model": name, "choices": [choice]}

    def draw(self, model, content):
        """Return the tokens of an answer, their log-probabilities, and why it ended."""
        import torch

        assert content["logprobs"] == 0
        assert content["return_token_ids"] is True
        generator, tokens, log_probs = torch.Generator().manual_seed(content["seed"]), [], []
        raw = self.options.logprobs_mode == "raw_logprobs"
        while len(tokens) < content["max_tokens"]:
            with torch.no_grad():
                logits = model(torch.tensor([content["prompt"] + tokens])).logits[0, -1].float()
            warm = (logits / content["temperature"]).log_softmax(dim=-1)
            token = int(torch.multinomial(warm.exp(), 1, generator=generator))
            tokens.append(token)
            log_probs.append(float((logits.log_softmax(dim=-1) if raw else warm)[token]))
            if token in content["stop_token_ids"]:
                return tokens, log_probs, "stop"
        return tokens, log_probs, "length"


def main():
    parser = argparse.ArgumentParser()
    for option in ("--model", "--served-model-name", "--host", "--dtype", "--logprobs-mode"):
        parser.add_argument(option, required=True)
    for option in ("--port", "--max-model-len"):
        parser.add_argument(option, required=True, type=int)
    for option in ("--generation-config", "--max-loras", "--max-lora-rank", "--gpu-memory-utilization"):
        parser.add_argument(option)
    parser.add_argument("--hf-overrides", default="{}")
    for switch in ("--enable-lora", "--enforce-eager", "--enable-sleep-mode"):
        parser.add_argument(switch, action="store_true")
    options = parser.parse_args()
    if os.environ.get(FAULT) == "start":
        raise SystemExit("ValueError: no memory for the cache")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.json_server import JsonHandler

    served = Served(options)
    served.note("start", {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES")})

    class Handler(JsonHandler):
        def do_GET(self):
            self._reply(None)

        def do_POST(self):
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, content):
            key = os.environ.get("VLLM_API_KEY")
            has_key = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            if self.path.startswith("/v1/") and not has_key:
                self._send(401, {"error": "Unauthorized"})
                return
            self._send(*served.answer(self.path, content))

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
