"""What one step of training is, whatever framework runs it: what the closed forms of memory and of speed start from."""

from dataclasses import dataclass
from typing import Literal

from flytune.models.geometry import Geometry
from flytune.sharding.base import Layout

Dtype = Literal["float32", "bfloat16", "float16"]
Loss = Literal["hf", "fp32_logits", "chunked", "liger", "foak"]
Profile = Literal["flytune", "transformers", "transformers_4_45", "composer", "litgpt", "torchtune", "fsdp_qlora", "torch"]

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one number."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps for each trained parameter, and how it steps."""

    name: str
    state_bytes: float | None = None
    """Bytes a parameter; None: two moments in the dtype of the parameter that it updates, as torch's AdamW keeps them."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    in_backward: bool = False
    """Each parameter is stepped, and its gradient freed, as soon as backward has it."""
    paged: bool = False
    """States are in unified memory, and leave the GPU where it has no room."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of training on one kind of machine. Sizes of batches are those of one GPU."""

    geometry: Geometry
    method: Literal["full", "lora", "qlora"]
    sharding: Layout
    gpus: int
    """On all nodes together."""
    nodes: int
    gpu_memory_gib: float
    """What the driver lets a process have: 79.2 of an A100 of 80 GB."""
    weight_dtype: Dtype
    """That trained weights (full) or the frozen base (lora) lie in between steps; of qlora, what is not quantized."""
    precision: Literal["pure", "autocast", "fsdp"]
    """pure: computes in the dtype of the weights. autocast: torch.autocast. fsdp: FSDP's own mixed precision."""
    compute_dtype: Dtype
    optimizer: Optimizer
    sequence_length: int
    micro_batch: int
    accumulation: int = 1
    quantization: Literal["none", "nf4", "nf4_double", "gptq4"] = "none"
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    """Names out of q, k, v, o, gate, up, down, lora_head, embedding and head; the last two are trained whole."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    checkpointing: Literal["none", "full", "offloaded"] = "none"
    attention: Literal["flash", "sdpa", "eager"] = "sdpa"
    loss: Loss = "hf"
    variable_length: bool = False
    """Samples are as long as they are, up to sequence_length; else every batch has one shape."""
    compiled: bool = False
    kbit_float32: bool = False
    """Whether peft's prepare_model_for_kbit_training made what is not quantized float32."""
    on_cpu: bool = False
    """Computation on a CPU, by torch's kernels for it."""
    profile: Profile = "flytune"
    """The framework whose documented behaviour counts; see closed_form."""

    @property
    def tokens(self) -> int:
        """In one forward pass of one GPU, at most."""
        return self.micro_batch * self.sequence_length

    @property
    def sharded(self) -> bool:
        """Whether parameters are divided among the GPUs and gathered when needed."""
        return self.sharding.startswith("fsdp") or self.sharding == "zero3"

    @property
    def lora_parameters(self) -> int:
        """Of the adapters' matrices: r x (in + out) for each adapted linear layer (LoRA, Hu et al. 2021, §4.1)."""
        wide = sum(rows + columns for name, rows, columns in self.geometry.named_linears if name in self.lora_targets)
        head = self.geometry.hidden_size + self.geometry.vocab_size if "lora_head" in self.lora_targets else 0
        return self.lora_r * (self.geometry.num_hidden_layers * wide + head)

    @property
    def trained_whole(self) -> int:
        """Parameters of embedding and head that are trained as they are, beside adapters."""
        one = self.geometry.vocab_size * self.geometry.hidden_size
        return one * sum(name in self.lora_targets for name in ("embedding", "head"))

    @property
    def trained(self) -> int:
        """Parameters that the optimizer updates."""
        return self.geometry.parameters if self.method == "full" else self.lora_parameters + self.trained_whole
