"""One step of training on one kind of machine: the input of all estimates of memory and time."""

import math
from dataclasses import dataclass
from typing import Literal

from training_estimates.degrees import Degrees
from training_estimates.framework import TRL, Framework
from training_estimates.layout import Layout
from training_estimates.sizes import Geometry, Linear

Dtype = Literal["float32", "bfloat16", "float16"]

Precision = Literal["pure", "autocast", "policy"]
"""Precision of a forward pass. pure: in the dtype of the weights; autocast: torch.autocast; policy: FSDP's
mixed precision."""
BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The states that an optimizer keeps for each trained parameter, and how it steps."""

    name: str
    state_bytes: float | None = None
    """Bytes a parameter; None: two moments in the dtype of the parameter that it updates, as torch's AdamW
    keeps them."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    in_backward: bool = False
    """True if each parameter is updated, and its gradient freed, as soon as backward has computed it."""
    paged: bool = False
    """True if states are in unified memory, and leave the GPU where it has no room."""
    embedding_bytes: float | None = None
    """Bytes a parameter of the trained embedding, where they differ from state_bytes."""
    factored: bool = False
    """True for Adafactor: a float32 number for each row and column of a matrix, instead of state_bytes."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """Answers that the trained model draws token by token before it trains them. Numbers are those of one
    process."""

    answers: int
    """Answers in an optimizer step."""
    at_a_time: int
    """Answers that are drawn together."""
    evaluated_at_a_time: int
    """Answers that are drawn together while the live model is scored; 0 where none are."""
    tokens: int
    """Tokens of an answer, at most; what they leave of sequence_length is the prompt's."""
    by_vllm: bool = False
    """True if a server of vLLM draws them, all together, and the trained model scores them `at_a_time`."""
    teacher: Geometry | None = None
    """Sizes of a frozen model that each process holds beside the trained one, and that scores a micro batch
    of them at a time; None where there is none."""
    served: int | None = None
    """Answers in an optimizer step that a server of vLLM draws; None: those of one process."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Vectors of all rows of an optimizer step, on all processes, whose similarities are its loss."""

    sizes: tuple[int, ...]
    """Numbers of a vector whose similarities are taken: fewer first ones, if there are, then all of them."""
    similarities: int
    """Similarities that are in memory at a time, of whole queries."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of training on one kind of machine. Batch sizes are those of one GPU."""

    geometry: Geometry
    method: Literal["full", "lora", "qlora"]
    layout: Layout
    gpus: int
    """Number of GPUs on all nodes together."""
    nodes: int
    gpu_memory_gib: float
    """Memory that the driver offers to a process: 79.2 GiB of an A100 of 80 GB."""
    weight_dtype: Dtype
    """Dtype in which trained weights (full) or the frozen base (lora) are stored between steps; of qlora, the
    parameters that are not quantized."""
    precision: Precision
    compute_dtype: Dtype
    optimizer: Optimizer
    sequence_length: int
    micro_batch: int
    accumulation: int = 1
    sequences_per_row: int = 1
    """Sequences of up to sequence_length tokens in each row of a micro batch: two of a pair."""
    head_outputs: int | None = None
    """Outputs of a head that is trained completely, also beside an adapter; None for the logits of the
    vocabulary."""
    frozen: int = 0
    """Parameters that a full fine-tune does not train."""
    reference: Literal["none", "adapter", "copy"] = "none"
    """Frozen model that a step also runs forward: the model without its adapter, or a second copy of the
    weights."""
    frozen_passes: int = 0
    """Forward passes of a micro batch without gradients, beside that of training: of the reference, and of
    other answers."""
    quantization: Literal["none", "nf4", "nf4_double", "fp4", "fp4_double", "int8", "gptq4"] = "none"
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    """Names of linear layers (q, k, v, o, gate, up, down in Llama's layout), lora_embedding, lora_head,
    embedding and head; the last two are fully trained."""
    lora_leaves_out: tuple[str, ...] = ()
    """Keys of linear layers that have a name of lora_targets and no adapter: of an encoder, of attention to
    images."""
    lora_ranks: tuple[tuple[str, float], ...] = ()
    """Mean ranks over the layers of those linear layers that have another one than `lora_r`, by their
    keys."""
    lora_experts: bool = False
    """True if experts that are one parameter of their layer have adapters, which PEFT adds to the weights
    before a product."""
    dora: bool = False
    """True if DoRA trains the norms of the rows of adapted weights too."""
    adapter_dropout: bool = True
    """True if adapters drop inputs out."""
    token_rows: int = 0
    """Tokens whose rows of embedding and head are trained beside an adapter, where these are not fully
    trained."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    checkpointing: Literal["none", "full", "offloaded"] = "none"
    attention: Literal["flash", "sdpa", "eager"] = "sdpa"
    variable_length: bool = False
    """True if samples have different lengths, up to sequence_length; otherwise all batches have one shape."""
    compiled: bool = False
    kbit_float32: bool = False
    """True if peft's prepare_model_for_kbit_training made all parameters float32 that are not quantized."""
    workspaces: float = 0.0
    """Bytes of cuBLAS's workspaces on one GPU (accelerators.py)."""
    on_cpu: bool = False
    """True if a CPU computes it, with torch's kernels for CPUs."""
    network_gbs: float = math.inf
    """Upper limit of a node's bandwidth to other nodes, GB/s, beside the accelerator's network_gbs (its
    network's)."""
    framework: Framework = TRL
    decoding: Decoding | None = None
    contrast: Contrast | None = None
    image_tokens: int = 0
    """Tokens of images in a micro batch, at most."""
    image_pixels: int | None = None
    """Pixels of an image, at most; None where only the length of a row limits them."""
    trains_tower: bool = False
    """True if what reads the images is trained too."""

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass of one GPU, at most."""
        return -(-self.micro_batch * self.sequences_per_row * self.sequence_length // self.degrees.copies)

    @property
    def degrees(self) -> Degrees:
        """Processes of the run, and what they divide."""
        return self.layout.degrees(self.gpus, self.nodes)

    @property
    def updated_bytes(self) -> int:
        """Bytes of a trained number as the optimizer updates it: adapters are float32, and so are DeepSpeed's
        master copies."""
        return 4 if self.method != "full" or self.layout.deepspeed else BYTES[self.weight_dtype]

    @property
    def optimizer_on(self) -> Literal["none", "cpu", "nvme"]:
        """Device that optimizer states are offloaded to."""
        return self.offload if self.layout.optimizer_on is None else self.layout.optimizer_on

    @property
    def parameters_on(self) -> Literal["none", "cpu", "nvme"]:
        """Device that DeepSpeed offloads parameters to."""
        if self.layout.parameters_on is not None:
            return self.layout.parameters_on
        return (
            self.offload if self.layout.shards_parameters and self.framework.offloads_parameters else "none"
        )

    @property
    def lora_parameters(self) -> int:
        """Parameters of the adapters' matrices: r x (in + out) for each adapted linear layer (LoRA, Hu et al.
        2021, §4.1)."""
        layers = sum(
            self.rank(linear) * linear.count * (linear.rows + linear.columns) for linear in self.adapted
        )
        return round(layers + self.table_adapters)

    @property
    def table_adapters(self) -> float:
        """Parameters of the adapters on embedding and head."""
        width, ranks = self.geometry.hidden_size + self.geometry.vocab_size, dict(self.lora_ranks)
        tables = [name for name in ("lora_embedding", "lora_head") if name in self.lora_targets]
        return width * sum(ranks.get(name, self.lora_r) for name in tables)

    @property
    def adapted(self) -> list[Linear]:
        """Adapted linear layers of all decoder layers; a matrix that modules share counts once for each of
        them."""
        return [
            linear.model_copy(update={"count": linear.modules}) if linear.modules else linear
            for linear in self.geometry.linears
            if linear.name in self.lora_targets
            and (linear.adaptable or (self.lora_experts and linear.is_experts))
            and linear.key not in self.lora_leaves_out
        ]

    @property
    def folded(self) -> list[Linear]:
        """Adapted parameters of experts, whose adapters are added to the weights before each product."""
        return [linear for linear in self.adapted if linear.is_experts]

    @property
    def adapted_layers(self) -> list[Linear]:
        """Adapted linear layers, whose adapters have an input of their own."""
        return [linear for linear in self.adapted if not linear.is_experts]

    def rank(self, linear: Linear) -> float:
        """Return the mean rank of a linear layer's adapters."""
        return dict(self.lora_ranks).get(linear.key, self.lora_r)

    @property
    def magnitudes(self) -> int:
        """Parameters of DoRA's magnitudes: one for each row of an adapted weight (Liu et al. 2024, eq. 5)."""
        return sum(linear.count * linear.columns for linear in self.adapted) if self.dora else 0

    @property
    def fully_trained(self) -> int:
        """Parameters of embedding and head that are trained as they are, beside adapters."""
        table = self.geometry.table_parameters
        return table * sum(name in self.lora_targets for name in ("embedding", "head"))

    @property
    def tables_by_row(self) -> tuple[str, ...]:
        """Embedding and head, as far as rows of them are trained; a tied head is the embedding."""
        if not self.token_rows:
            return ()
        tables = ("embedding",) if self.geometry.tie_word_embeddings else ("embedding", "head")
        return tuple(name for name in tables if name not in self.lora_targets)

    @property
    def trains_head(self) -> bool:
        """True if the loss computes the gradient of the head's weight."""
        tables = {*self.lora_targets, *self.tables_by_row}
        return (
            self.method == "full"
            or "head" in tables
            or (self.geometry.tie_word_embeddings and "embedding" in tables)
        )

    @property
    def largest_trained(self) -> int:
        """Parameters of the largest trained tensor; transformers 5 joins gate and up of all experts of a
        layer in one."""
        geometry = self.geometry
        table = geometry.table_parameters
        if self.method == "full":
            experts = (
                2 * geometry.experts * geometry.hidden_size * geometry.intermediate_size
                if geometry.experts > 1
                else 0
            )
            return max(table, experts, *(linear.rows * linear.columns for linear in geometry.linears))
        if self.fully_trained:
            return table
        return round(
            max(
                (self.rank(adapted) * max(adapted.rows, adapted.columns) for adapted in self.adapted),
                default=0,
            )
        )

    @property
    def trained(self) -> int:
        """Parameters that the optimizer updates."""
        if self.method == "full":
            return self.geometry.parameters - self.frozen
        rows = self.token_rows * self.geometry.hidden_size * len(self.tables_by_row)
        head = self.geometry.head_parameters(self.head_outputs or 0)
        return self.lora_parameters + self.magnitudes + self.fully_trained + rows + head

    @property
    def outputs(self) -> int:
        """Outputs of the head for each token: the vocabulary, or those of a head of few; 0 without a head."""
        return self.geometry.vocab_size if self.head_outputs is None else self.head_outputs
