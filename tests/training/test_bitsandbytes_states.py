"""States of bitsandbytes' optimizers: their memory after a resume, and the update of a sharded parameter."""

import copy

import pytest
import torch

from flytune.training import bitsandbytes_states
from tests.support import ranks

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def adamw(parameter, bits=32):
    import bitsandbytes

    parameter.grad = torch.full_like(parameter, 0.5)
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    return bitsandbytes_states.adapt(
        bitsandbytes.optim.AdamW(groups, lr=0.1, optim_bits=bits, min_8bit_size=16, is_paged=True)
    )


def test_its_class_is_recognized_as_that_of_bitsandbytes():
    import bitsandbytes

    optimizer = adamw(torch.nn.Parameter(torch.ones(4)))
    assert isinstance(optimizer, bitsandbytes.optim.AdamW)
    assert str(type(optimizer)) == str(bitsandbytes.optim.AdamW)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    assert bitsandbytes_states.adapt(other) is other
    assert type(other) is torch.optim.SGD


def test_states_are_loaded_into_the_memory_that_they_have():
    for bits in (8, 32):
        one, two = (torch.nn.Parameter(torch.arange(32.0)) for _ in range(2))
        first, second = adamw(one, bits), adamw(two, bits)
        first.step()
        saved = copy.deepcopy(first.state_dict())
        made = []
        make = second.get_state_buffer
        second.get_state_buffer = lambda *args, made=made, make=make, **named: (
            made.append(make(*args, **named)) or made[-1]
        )
        second.load_state_dict(saved)
        # bitsandbytes' own method would take the loaded tensors, which are on the GPU and not paged.
        assert [id(second.state[two][name]) for name in ("state1", "state2")] == [
            id(buffer) for buffer in made
        ]
        two.data.copy_(one.data)
        held = second.state[two]["state1"].data_ptr()
        second.load_state_dict(saved)
        assert second.state[two]["state1"].data_ptr() == held
        for optimizer in (first, second):
            optimizer.step()
        assert torch.equal(one, two)
        assert second.state[two]["step"] == 2


def sharded_steps():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh, full = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(5.0)
    # Of five rows the second process has two; of one it has none.
    for rows in (5, 1):
        parameter = torch.nn.Parameter(full[:rows].clone())
        part = torch.nn.Parameter(distribute_tensor(full[:rows].clone(), mesh, [Shard(0)]))
        for optimizer in (adamw(parameter), sharded := adamw(part)):
            optimizer.step()
            optimizer.step()
        state = sharded.state[part]
        assert isinstance(state["state1"], DTensor)
        assert state["state1"].shape == part.shape
        assert torch.equal(part.full_tensor(), parameter)
        assert len(sharded.state) == 1
    return True


def test_a_sharded_parameter_is_updated_like_a_complete_one():
    assert ranks.run(2, sharded_steps)
