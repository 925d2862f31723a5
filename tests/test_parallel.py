"""One process = DDP 2 = FSDP 2 = FSDP 4 = hybrid 2 x 2: losses, gradients, weights after updates, communication, shares, resumes.

Each world size is launched once with all of its cases (parallel_worker.py); the truth is one process without any of it.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from project import ROOT

V, L, STACK = {}, {"n_layer": 2, "n_loop": 2}, {"n_layer": 2, "n_loop": 2, "loop_order": "stack"}
BF16 = {"dtype": "bfloat16"}
TRUTH = {"V": V, "L": L, "stack": STACK, "V bf16": V | BF16, "L bf16": L | BF16}
FSDP, ACCUM = {"parallel": "fsdp"}, {"micro_batch": 1}
ONE = {
    "V accum": V | ACCUM,
    "L ckpt all": L | {"ckpt": "all", "loss_chunks": 3},
    "stack ckpt": STACK | {"ckpt": "all"} | ACCUM,
    "L compile": L | {"compile": True, "ckpt": "all"},
}
TWO = {
    "V ddp": V | ACCUM,
    "L ddp": L | {"ckpt": "loop", "loss_chunks": 4},
    "stack ddp": STACK | {"ckpt": "all"},
    "V fsdp": V | FSDP | ACCUM,
    "L fsdp": L | FSDP | ACCUM,
    "L fsdp zero 3": L | FSDP | ACCUM | {"zero": 3, "ckpt": "all"},
    "stack fsdp": STACK | FSDP | {"ckpt": "all", "loss_chunks": 2},
    "V bf16 fsdp": V | FSDP | BF16 | {"ckpt": "all"},
    "L bf16 fsdp": L | FSDP | BF16 | {"ckpt": "all", "micro_batch": 2},
    "L fsdp compile": L | FSDP | {"compile": True, "ckpt": "all"},
}
FOUR = {
    "V fsdp": V | FSDP | {"ckpt": "all"},
    "L fsdp": L | FSDP | ACCUM | {"ckpt": "loop", "loss_chunks": 2},
    "stack fsdp zero 3": STACK | FSDP | ACCUM | {"zero": 3},
    "L hybrid": L | FSDP | ACCUM | {"shard_ranks": 2},
    "V hybrid zero 3": V | FSDP | {"shard_ranks": 2, "zero": 3, "ckpt": "all"},
    "V compile": V | FSDP | ACCUM | {"compile": True},
}


def launch(folder, ranks: int, cases: dict) -> dict:
    (folder / f"{ranks}.json").write_text(json.dumps(cases))
    command = [sys.executable] + (["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else [])
    command += ["tests/parallel_worker.py", str(folder / f"{ranks}.json"), str(folder / f"{ranks}.pt")]
    done = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / f"{ranks}.pt", weights_only=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("parallel")
    return {1: launch(folder, 1, TRUTH | ONE), 2: launch(folder, 2, TWO), 4: launch(folder, 4, FOUR)}


def pairs():
    return [pytest.param(ranks, name, id=f"{ranks} {name}") for ranks, cases in ((1, ONE), (2, TWO), (4, FOUR)) for name in cases]


@pytest.mark.parametrize("ranks, name", pairs())
def test_equal_to_one_process(seen, ranks, name):
    got, want = seen[ranks][name], seen[1][name.split()[0] + (" bf16" if "bf16" in name else "")]
    limit = 5e-2 if "bf16" in name else 1e-4 if "compile" in name else 1e-5
    assert got["grads"].keys() == want["grads"].keys()
    for key, grad in want["grads"].items():
        assert (got["grads"][key] - grad).norm() < limit * grad.norm(), key
    for a, b in zip(got["losses"], want["losses"], strict=True):  # later losses come after updates: stale weights would show
        assert a == pytest.approx(b, rel=limit)
    assert got["val"] == pytest.approx(want["val"], rel=limit)
    assert got["names"] == want["names"]
    assert not any("_orig_mod" in n for n in got["names"])


@pytest.mark.parametrize("arm", ["V", "L"])
def test_bf16_is_near_fp32_and_not_the_same(seen, arm):
    for ranks, name in ((1, f"{arm} bf16"), (2, f"{arm} bf16 fsdp")):
        for (a, _), (b, _) in zip(seen[ranks][name]["losses"], seen[1][arm]["losses"], strict=True):
            assert a != b
            assert a == pytest.approx(b, rel=1e-2)
            assert a != torch.tensor(a).bfloat16().item()  # an fp32 loss, not one quantised to bf16's steps of 0.0156


def test_a_weight_used_twice_sums_its_gradient_in_fp32(seen):
    """One use: the gradient is a bf16 number. Two uses: their sum must not be rounded to one, or the looped arm alone would lose bits."""
    for arm, fewest, most in (("V", 0.0, 0.01), ("L", 0.3, 1.0)):
        grad = seen[1][f"{arm} bf16"]["grads"]["blocks.0.mlp.up.weight"]
        assert fewest <= (grad != grad.bfloat16().float()).float().mean().item() <= most


def test_gathers_of_one_accumulated_step(seen):
    """ZeRO-2 with 4 micro-batches: one gather and one reduction a stored block and one for the root, so that L's blocks take half of V's."""
    v, el, three = (seen[2][k]["comms"] for k in ("V fsdp", "L fsdp", "L fsdp zero 3"))
    assert v == {"all_gather": 4 + 1, "reduce_scatter": 4 + 1}
    assert el == {"all_gather": 2 + 1, "reduce_scatter": 2 + 1}
    assert three["all_gather"] > 4 * el["all_gather"]
    assert three["reduce_scatter"] == 4 * el["reduce_scatter"]


@pytest.mark.parametrize("ranks, name, shards", [(2, "V fsdp", 2), (2, "L fsdp", 2), (4, "V fsdp", 4), (4, "L hybrid", 2), (2, "V ddp", 1)])
def test_each_rank_holds_its_share(seen, ranks, name, shards):
    """1/world of every tensor, in whole rows: the last rank holds fewer where they do not divide."""
    sizes = [(g.shape[0], g.numel() // g.shape[0]) for g in seen[ranks][name]["grads"].values()]
    share = [sum(max(0, min(math.ceil(n / shards), n - r * math.ceil(n / shards))) * row for n, row in sizes) for r in range(shards)]
    assert seen[ranks][name]["held"] == share * (ranks // shards)
    assert shards == 1 or max(share) < 1.1 * sum(share) / shards


def test_two_graphs_whatever_the_depth():
    """Compiled, one graph with gradients and one without serve all blocks; a recompile beyond the limit is an error."""
    code = """
import torch, train
from torch._dynamo.utils import counters
for n_layer, n_loop in ((4, 1), (2, 2), (5, 2), (3, 3)):
    torch._dynamo.reset(); counters.clear()
    cfg = train.Config(arm="V", rung="t", n_layer=n_layer, n_loop=n_loop, n_embd=16, n_head=2, ffn_hidden=16, window=8, vocab_size=31, eps=0.3, compile=True, ckpt="all")
    model = train.compile_blocks(train.Transformer(cfg), cfg); model.init_weights(0)
    x = torch.randint(31, (2, 8))
    for _ in range(2):
        model(x, x).backward()
        with torch.no_grad(): model(x, x)
    print(counters["stats"]["unique_graphs"])
torch._dynamo.config.recompile_limit = 1
torch._dynamo.reset()
try:
    for B in (2, 3, 4): model(torch.randint(31, (B, 8)))
    print("silent")
except Exception as e: print("error")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    *graphs, last = done.stdout.split()
    assert all(1 <= int(g) <= 2 for g in graphs), graphs
    assert last == "error"


def record(p, tag: str) -> list[tuple]:
    run = json.loads((p.path / f"results/nano/L_s0_{tag}.json").read_text())
    return [(row["step"], row["val_loss"], row["train_loss"]) for row in run["curve"]], run


def test_saved_on_two_ranks_resumed_on_one_and_four(project):
    """FSDP over 2 to step 6, then on in one process, and over 4 as whole copies: the losses are those of the run in one piece."""
    steps = ["--eval_every=3", "--save_every=6", "--resume=auto", "--ckpt=all"]
    project.ok("train.py", *project.tiny("L", *steps, "--tag=whole", "--max_steps=12"))
    project.ok("train.py", *project.tiny("L", *steps, "--tag=half", "--parallel=fsdp", "--max_steps=6"), ranks=2)
    for tag, ranks, more in (("one", 0, []), ("four", 4, ["--parallel=ddp"]), ("shards", 4, ["--parallel=fsdp", "--zero=3"])):
        shutil.copytree(project.path / "out/nano/L_s0_half", project.path / f"out/nano/L_s0_{tag}")
        state = project.path / f"out/nano/L_s0_{tag}/last/trainer.json"
        run = json.loads(state.read_text())
        run["config"].update(tag=tag, max_steps=12)
        state.write_text(json.dumps(run))
        digests = json.loads((state.parent / "digests.json").read_text())
        (state.parent / "digests.json").write_text(json.dumps(digests | {"trainer.json": hashlib.sha256(state.read_bytes()).hexdigest()}))
        out = project.ok("train.py", *project.tiny("L", *steps, f"--tag={tag}", "--max_steps=12", *more), ranks=ranks)
        assert "resumed at step 6" in out
        got, run = record(project, tag)
        assert run["world_size"] == max(1, ranks)
        for a, b in zip(got, record(project, "whole")[0], strict=True):
            assert a == pytest.approx(b, abs=1e-5)
