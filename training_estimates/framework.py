"""Behaviour of a training framework from which memory and step time follow."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Memory and bandwidth of the code that computes the loss. Bytes are those of one token in one forward
    pass."""

    keeps_norm: bool = True
    """True if the input and the output of the last norm are kept beside what follows."""
    per_hidden: float = 0.0
    """Bytes per entry of hidden_size while the loss is computed."""
    per_word: float = 0.0
    """Bytes per vocabulary entry while the loss is computed."""
    shift_per_word: float = 0.0
    """Bytes per vocabulary entry of the copy that shifts logits by a token; a batch of one needs none
    (already contiguous)."""
    moved_per_word: float
    """Bytes through GPU memory per vocabulary entry, forward and backward."""
    tiles: bool = False
    """True if it is computed in tiles of logits, which need memory of their own: TRL's chunked loss."""
    cpu_tokens: int = 4096
    """Tokens of a tile on a CPU."""


CHUNKED = Loss(keeps_norm=False, per_hidden=4, moved_per_word=24, tiles=True)
"""TRL's chunked loss (trl 1.16, chunked_nll): the hidden states and their gradient, in 16 bits; no tensor of
all logits."""


class Passes(NamedTuple):
    """Bytes through GPU memory in the forward and in the backward pass."""

    forward: float
    backward: float

    @classmethod
    def sum(cls, counts: "Iterable[tuple[Passes, float]]") -> Self:
        """Return the bytes of several operations, each times how often."""
        every = list(counts)
        return cls(
            sum(passes.forward * times for passes, times in every),
            sum(passes.backward * times for passes, times in every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKernels:
    """Bytes that one token moves through LoRA beside one linear layer, for each of its inputs and outputs."""

    inputs: Passes
    outputs: Passes
    float32: bool = False
    """True if its products are in float32, without tensor cores (torch's default for them)."""


AUTOCAST_ADAPTERS = AdapterKernels(inputs=Passes(14, 22), outputs=Passes(12, 8))
"""The input is cast to the adapter's float32 and back (2+4+4+2) and read (2); B's result is written (2),
scaled (4) and added (2+2+2). Backward: A's two products read and write (2+2), both casts (6+6), the sum with
the layer's own gradient (6); the scale (4), and B's two products read its gradient (2+2)."""
FUSED_ADAPTERS = AdapterKernels(inputs=Passes(2, 4), outputs=Passes(6, 12))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Bytes that one token moves in one layer, for each number of a width."""

    norm: Passes
    """Bytes per hidden_size, for each of the two norms; backward with the sums of its gradient and the
    residual stream's, and of the gradients of the products that take its result: three behind the first norm,
    two behind the second one."""
    rotary: Passes
    """Bytes per width of queries and keys."""
    activation: Passes
    """Bytes per intermediate_size of the MLP, with the product of gate and up where it has one."""
    launches: int
    """Kernels in one layer's forward pass, products included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Differences between training frameworks. The defaults are those of plain torch."""

    loss: Loss
    fused_kernels: bool = False
    """True if norms and rotations are each one fused kernel."""
    kernels: Kernels | None = None
    """Kernels around the matrix products, where they are none of those of kernels.py."""
    fused_adapters: bool = False
    """True if adapters beside a quantized base are one fused kernel."""
    attention_share: float = 1.0
    """Speed of its attention kernel as a share of FlashAttention-2's."""
    adapters: AdapterKernels = AUTOCAST_ADAPTERS
    """LoRA's kernels."""
    pure_adapters: AdapterKernels = AUTOCAST_ADAPTERS
    """LoRA's kernels without autocast."""
    float32_adapters: bool = True
    """True if adapters are float32 (PEFT's autocast_adapter_dtype), not in the dtype of the base."""
    float32_copies: bool = False
    """True if layers that are fully trained beside adapters (PEFT's modules_to_save) are float32."""
    shared_adapter_inputs: bool = False
    """True if adapters of one input share its copy and its dropout mask; PEFT makes one for each adapter."""
    upcasts: bool = False
    """True if trained parameters become float32 under FSDP with mixed precision."""
    prepares_kbit: bool = False
    """True if every 4-bit model is prepared for training: parameters that are not quantized are stored in
    float32."""
    keeps_quantized_inputs: bool = False
    """True if 4-bit layers keep their inputs for backward, as those of bitsandbytes did in 2024
    (MatMul4Bit)."""
    quantizes_head: bool = False
    """True if the head of a 4-bit model is quantized too; its product takes a copy in float16, and one in the
    compute dtype."""
    expandable_segments: bool = False
    """True if torch's allocator lets segments grow (PYTORCH_ALLOC_CONF), so that longer rows use the memory
    of shorter ones."""
    reentrant: bool = False
    """True if a checkpointed layer runs a backward pass inside of backward (torch.utils.checkpoint,
    use_reentrant=True)."""
    retained_streams: int = 0
    """Tensors of the residual stream's size that each layer keeps until backward ends."""
    prefetches: bool = True
    """True if FSDP gathers the next layer while one is at work in backward."""
    gathers_adapters: bool = False
    """True if FSDP wraps linear layers one by one, so that adapters and frozen weights are gathered as one
    full unit."""
    reduces_stored_dtype: bool = False
    """True if gradients of a full fine-tune are reduced in the dtype of the stored weights."""
    fsdp_reduces_float32: bool = False
    """True if FSDP reduces gradients in float32."""
    offloads_parameters: bool = False
    """True if ZeRO-3 with offload also keeps parameters in host memory."""
    evaluated_row: float = 0.0
    """Bytes per token and vocabulary entry of one evaluated sample."""
    data_seconds: float = 0.0
    """Seconds per token to read and collate batches between steps."""


TRL = Framework(loss=CHUNKED)
"""TRL's trainer, with its own loss."""
