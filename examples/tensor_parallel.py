"""Distil a model whose layers and vocabulary are over several devices, and check it against one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--steps 20]

Student and teacher are sharded by PyTorch's `parallelize_module`. Two losses are asked for: of logits, which come out
of a `ColwiseParallel` head as slices of the vocabulary, and of hidden states and heads, whose logits are never all in
memory. Loss and every gradient are asserted against the same models in one process; then the student learns. On NCCL
where each process has a GPU, else on gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kullback

VOCAB, WIDTH, TOKENS = 501, 64, 96  # a vocabulary that does not divide: slices are uneven


class Model(nn.Module):
    """A next-token model without attention, which a loss does not see."""

    def __init__(self, seed: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embedding(tokens))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def parallelized(model: Model, mesh: DeviceMesh) -> Model:
    """The layers over the mesh: hidden states come out on every device, logits as slices."""
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model.to(mesh.device_type), mesh, plan)


def of_logits(student: Model, teacher: Model, tokens: Tensor) -> Tensor:
    return kullback.divergence(student(tokens), teacher(tokens), "jensen_shannon")


def of_hidden_states(student: Model, teacher: Model, tokens: Tensor) -> Tensor:
    sides = [(laid_out(model.hidden(tokens), model.head.weight), model.head.weight) for model in (student, teacher)]
    return kullback.linear_divergence(*sides[0], *sides[1], "jensen_shannon")


def laid_out(hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden states that every device has, as a DTensor where the head is one."""
    if not isinstance(weight, DTensor):
        return hidden
    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens = torch.randint(VOCAB, (4, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)

    alone, its_teacher = Model(1, 1.0).to(device), Model(2, 8.0).to(device).requires_grad_(False)
    student, teacher = parallelized(Model(1, 1.0), mesh), parallelized(Model(2, 8.0), mesh).requires_grad_(False)
    for name, loss in (("logits", of_logits), ("hidden states", of_hidden_states)):
        expected, ours = loss(alone, its_teacher, tokens), loss(student, teacher, tokens)
        torch.testing.assert_close(whole(ours), expected, rtol=1e-5, atol=0)
        alone.zero_grad()
        student.zero_grad()
        expected.backward()
        ours.backward()
        for (which, a), b in zip(alone.named_parameters(), student.parameters(), strict=True):
            gradient = whole(b.grad)
            # Products of a GPU round by 2⁻¹¹ where they use TF32, which torch leaves off: float32's roundings are left
            error = (gradient - a.grad).norm() / a.grad.norm()
            assert error < 1e-5, (name, which, error.item())
        if dist.get_rank() == 0:
            print(f"from {name}: {whole(ours).item():.6f}, as one process has it; so are all gradients")

    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, foreach=False)
    first = last = whole(of_hidden_states(student, teacher, tokens)).item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = of_hidden_states(student, teacher, tokens)
        loss.backward()
        optimizer.step()
        last = whole(loss.detach()).item()
    if dist.get_rank() == 0:
        print(f"divergence from the teacher in {steps} steps: {first:.4f} -> {last:.4f}")
    dist.barrier()  # a process that ends while another still waits may abort it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
