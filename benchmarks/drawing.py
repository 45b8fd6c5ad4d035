"""Tokens a second of drawing answers by transformers and by vLLM, of one model on this machine, in turns.

python -m benchmarks.drawing --python ENVIRONMENT/bin/python --model FOLDER
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flytune.rollouts import (
    Completion,
    Drawing,
    VllmProcess,
    VllmServer,
    WantedAnswer,
    draw,
    key_of,
    numbers_of,
)
from flytune.servers import Client

ANSWERS, TOKENS, TURNS = 64, 64, 3
_DRAWING = Drawing(ends=(), pad=0)
_MINUTES = 15


def main() -> int:
    """Draw in turns, and print the rates."""
    parser = argparse.ArgumentParser("python -m benchmarks.drawing", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", help="interpreter of an environment with vLLM")
    parser.add_argument("--model", type=Path, help="folder of a causal language model")
    asked = parser.parse_args()
    if asked.python is None or asked.model is None:
        sys.stdout.write("left out; give --python ENVIRONMENT/bin/python and --model FOLDER\n")
        return 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32").eval()
    prompts = [tokenizer(f"What is {number} + {ANSWERS}? ")["input_ids"] for number in range(ANSWERS)]
    wanted = [
        WantedAnswer(prompt, key_of(0, 1, prompt, place), TOKENS) for place, prompt in enumerate(prompts)
    ]
    uniforms = [numbers_of(answer.key, answer.most) for answer in wanted]
    options = ["--model", str(asked.model.absolute()), "--served-model-name", "base", "--dtype", "float32"]
    options += ["--max-model-len", "256", "--generation-config", "vllm", "--enforce-eager"]
    with tempfile.TemporaryDirectory() as folder:
        process = VllmProcess(asked.python, options, Path(folder) / "weights")
        server = VllmServer(Client(process.address, process.key, _MINUTES * 60, VllmServer.largest))
        process.wait(server.is_ready, _MINUTES * 60)
        engines: dict[str, Callable[[int], list[Completion]]] = {
            "transformers": lambda count: draw(model, prompts[:count], uniforms[:count], _DRAWING),
            "vLLM": lambda count: server.draw("base", wanted[:count], _DRAWING),
        }
        for engine in engines.values():
            engine(1)
        for _ in range(TURNS):
            for name, engine in engines.items():
                sys.stdout.write(f"{name:<14}{_rate(engine):8.0f} tokens a second\n")
                sys.stdout.flush()
        process.close()
    return 0


def _rate(engine: Callable[[int], list[Completion]]) -> float:
    began = time.monotonic()
    drawn = engine(ANSWERS)
    seconds = time.monotonic() - began
    tokens = sum(len(answer.tokens) for answer in drawn)
    assert tokens == ANSWERS * TOKENS, tokens
    return tokens / seconds


if __name__ == "__main__":
    sys.exit(main())
