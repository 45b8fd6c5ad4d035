"""The estimate of FSDP1's frozen units, compared with the same backward pass on the CPU."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, weakref
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

HIDDEN, TOKENS = 32, 2048
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
CPU = torch.device("cpu")


class Live(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return made


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.adapter = FSDP(nn.Linear(HIDDEN, HIDDEN), device_id=CPU)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.adapter(x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(FSDP(Layer(), device_id=CPU) for _ in range(layers))

    def forward(self, x, reentrant):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.sum()


for layers in (4, 12):
    model = FSDP(Model(layers), device_id=CPU)
    for reentrant in (True, False):
        loss = model(torch.randn(TOKENS, HIDDEN, requires_grad=True), reentrant)
        with Live() as live:
            loss.backward()
        print(round(live.peak / (4 * TOKENS * HIDDEN), 1))
"""


@pytest.mark.slow
def test_fsdp1_keeps_two_tensors_of_each_frozen_unit_within_a_reentrant_checkpoint_alone(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "rendezvous")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    # Made in backward and alive at once, in activations of one layer: 4 layers and 12, reentrant and not.
    few, few_plain, many, many_plain = (float(line) for line in ran.stdout.split())
    assert abs(many - few - 2 * 8) < 1
    assert abs(many_plain - few_plain) < 1
