"""Run by test_parallel.py, alone or under torchrun: train.py's own step on tiny models, every case of a JSON list; rank 0 writes what it saw.

torchrun --nproc_per_node=4 tests/parallel_worker.py cases.json out.pt
"""

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import train

# d = 42 and the hidden 50 divide by neither 4 ranks nor 8: FSDP pads
BASE = {
    "arm": "V", "rung": "test", "vocab_size": 61, "n_layer": 4, "n_embd": 42, "n_head": 3, "ffn_hidden": 50, "window": 16, "batch": 8, "micro_batch": 8,
    "unique_tokens": 2001, "val_tokens": 500, "grad_clip": 1e9, "warmup": 2, "lr": 1e-2,
}  # fmt: skip
STEPS = 3


class Recorder:
    """An optimizer that keeps the whole gradients of its first step."""

    def __init__(self, opt, names):
        self.opt, self.names, self.param_groups, self.grads = opt, names, opt.param_groups, {}

    def step(self):
        if not self.grads:
            self.grads = {n: whole(p.grad).clone() for n, p in self.names}
        self.opt.step()

    def zero_grad(self, set_to_none):
        self.opt.zero_grad(set_to_none=set_to_none)


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


@contextlib.contextmanager
def counted():
    """Counts of the two collectives of FSDP inside."""
    counts = {"all_gather": 0, "reduce_scatter": 0}
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")  # of torch 2.13 and of 2.11
    own = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name):
        def call(*args, **kwargs):
            counts["all_gather" if "gather" in name else "reduce_scatter"] += 1
            return own[name](*args, **kwargs)

        return call

    for name in own:
        setattr(dist, name, counting(name))
    yield counts
    for name, f in own.items():
        setattr(dist, name, f)


def build(case: dict):
    cfg = train.Config(**{**BASE, **case})
    cfg.eps = cfg.eps or train.default_eps(cfg.n_layer, cfg.n_loop)
    with torch.device("meta"):
        cfg.expect_params = train.Transformer(cfg).counts()["stored"]
    train.check_config(cfg, "test")
    device = train.setup_device(train.Config(device="cpu"))
    model = train.build_model(cfg, device)
    opt = train.build_optimizer(cfg, model)
    if train.WORLD > 1 and cfg.parallel == "ddp":
        model = DistributedDataParallel(model)
    return cfg, model, opt, device


def run(case: dict) -> dict:
    cfg, model, opt, device = build(case)
    data = np.random.RandomState(5).randint(cfg.vocab_size, size=cfg.unique_tokens).astype("<u2")
    names = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
    recorder, dtype, accum = Recorder(opt, names), train.compute_dtype(cfg, device), train.split_batch(cfg)[1]
    losses = []
    for step in range(STEPS):
        with counted() as counts:
            losses.append(train.train_step(model, recorder, data, cfg, step, accum, device, dtype))
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    val = train.evaluate(model, data[:500], cfg, device, dtype)
    return {"losses": losses, "val": val, "grads": recorder.grads, "comms": counts, "held": train.gather(held), "names": [n for n, _ in names]}


if __name__ == "__main__":
    cases, out = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, case in cases.items():
        out[name] = run(case)
    if train.RANK == 0:
        torch.save(out, sys.argv[2])
    train.leave(0)
