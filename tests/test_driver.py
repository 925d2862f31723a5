"""run.sh's rungs end to end on a CPU, with flip and 400m made tiny in a copy of the project, and the continuation to more epochs."""

import json
import os
import subprocess
import sys

import pytest

TINY = """
base = "V_nano.py"
arm = "V"
rung = "{rung}"
expect_params = 67_904
unique_tokens = 8000
val_tokens = 6000
window = 32
n_embd = 32
ffn_hidden = 48
batch = 16
epochs = 6
data = "data/tiny"
eval_every = 40
warmup = 20
"""


@pytest.fixture
def rungs(project):
    """The project with a rung of seconds under the name 400m (with a suite, a probe) and 1b (its gate is 400m)."""
    from project import TINY_PARAMS

    for rung in ("400m", "1b"):
        (project.path / f"config/V_{rung}.py").write_text(TINY.format(rung=rung).replace("67_904", str(TINY_PARAMS["V"])))
        (project.path / f"config/L_{rung}.py").write_text(f'base = "V_{rung}.py"\narm = "L"\nn_layer = 3\nn_loop = 2\nexpect_params = {TINY_PARAMS["L"]}\n')
        path = project.path / f"config/bars_{rung}.json"
        bars = json.loads(path.read_text()) | {"tasks": {"cloze": "acc", "lastword": "acc"}, "lr_grid": [4e-3, 2e-3, 1e-3]}
        bars["arms"] = {
            "V": {"n_layer": 6, "n_loop": 1, "expect_params": TINY_PARAMS["V"]},
            "L": {"n_layer": 3, "n_loop": 2, "expect_params": TINY_PARAMS["L"]},
        }
        bars["config"] = {"unique_tokens": 8000, "val_tokens": 6000, "epochs": 6.0, "length": 1.0, "lr": 2e-3}
        path.write_text(json.dumps(bars))
        (project.path / "data" / rung).symlink_to("tiny")
    (project.path / ".venv").symlink_to(sys.prefix)
    (project.path / "requirements.txt").write_text("")
    stamp = project.path / ".venv" / f"requirements.txt.{'e3b0c44298fc1c14'}"  # sha256 of nothing
    stamp.touch()
    yield project
    stamp.unlink()


def run_sh(p, *args: str) -> subprocess.CompletedProcess:
    env = os.environ | {"GPUS": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": "/nonexistent"}
    return subprocess.run(["bash", "run.sh", *args], check=False, cwd=p.path, env=env, capture_output=True, text=True, timeout=900)


def test_a_rung_from_probe_to_verdict(rungs):
    """The probe's winner is used by every run; a failed seed 0 ends it; a second time changes nothing; the gate holds 1b back."""
    bars = rungs.path / "config/bars_400m.json"
    held = json.loads(bars.read_text())
    bars.write_text(json.dumps(held | {"bars": {"val_gap_max": -9.0, "suite_gap_min": 1.0}}))  # cannot be met
    done = run_sh(rungs, "400m", "--edge", "--copy=echo copied >> copies.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    probe = json.loads((rungs.path / "results/400m/lr_probe.json").read_text())
    assert set(probe["final_val"]) == {"0.004", "0.002", "0.001"}
    assert probe["lr"] == float(min(probe["final_val"], key=probe["final_val"].get))
    assert ("an edge of the grid" in done.stdout) == probe["edge"]
    names = sorted(f.stem for f in (rungs.path / "results/400m").glob("*.json"))
    assert names == ["L_s0", "V_s0", "V_s0_lr0.001", "V_s0_lr0.002", "V_s0_lr0.004", "lr_probe"]
    runs = {n: json.loads((rungs.path / f"results/400m/{n}.json").read_text()) for n in names}
    assert runs["L_s0"]["config"]["lr"] == runs["V_s0"]["config"]["lr"] == probe["lr"]
    assert runs["V_s0_lr0.001"]["steps"] == round(0.05 * 6 * 249 / 16)
    assert runs["V_s0_lr0.001"]["curve"][-1]["lr"] == pytest.approx(1e-4)  # its own whole decay
    assert "KILLED" in done.stdout
    assert (rungs.path / "copies.txt").exists()
    again = run_sh(rungs, "400m", "--edge")
    assert again.returncode == 0
    assert {n: json.loads((rungs.path / f"results/400m/{n}.json").read_text()) for n in names} == runs
    gate = run_sh(rungs, "1b")
    assert gate.returncode == 1
    assert "400m is KILLED" in gate.stderr
    assert "copy it from the node" in run_sh(rungs, "1b", "--anyway", "--seeds=1").stderr
    anyway = run_sh(rungs, "1b", "--anyway", "--seeds=0", "--edge")
    assert "gate 400m: KILLED; it was bypassed (--anyway) when it was KILLED" in anyway.stdout, anyway.stdout + anyway.stderr
    # the registered run carried on at the floor: its own name, its own best, every row of the first part kept
    out = rungs.ok("train.py", "config/V_400m.py", "--epochs=8", f"--lr={probe['lr']}")
    assert "V_s0_e8  resumed at step 93 of 124" in out
    e8 = json.loads((rungs.path / "results/400m/V_s0_e8.json").read_text())
    assert e8["curve"][: len(runs["V_s0"]["curve"])] == runs["V_s0"]["curve"]
    assert all(row["lr"] == pytest.approx(probe["lr"] / 10) for row in e8["curve"] if row["step"] > 93)
    assert e8["status"] == "done"
    assert json.loads((rungs.path / "results/400m/V_s0.json").read_text()) == runs["V_s0"]
    assert "no state of the finished run" in rungs.refused("train.py", "config/V_400m.py", "--epochs=8", "--seed=1")


def test_wrong_arguments(rungs):
    for args, word in [
        (["400m", "--seed=0"], "does not take"),
        (["probe", "2b"], "takes a rung"),
        (["nano", "--recrod"], "--record"),
        (["flip"], "cannot"),  # no data there, and no hub to have it from
    ]:
        done = run_sh(rungs, *args)
        assert done.returncode != 0
        assert word in done.stderr, done.stderr
    assert run_sh(rungs).returncode == 2


def test_bits_on_four_ranks(project):
    """A miniature of bits_1b: bit tokens, FSDP over 4 real ranks; each holds its quarter, and the loss falls below ln 2."""
    project.ok("prepare.py", "files", "*.py", "--out=data/bits", "--tokens=80001", "--val_tokens=16000", "--tokenizer=bits")
    shape = (
        "--n_layer=3 --n_embd=64 --n_head=4 --ffn_hidden=96 --window=64 --batch=16 --micro_batch=4 --data=data/bits --unique_tokens=80001 --val_tokens=16000"
    )
    size = 3 * (4 * 64**2 + 3 * 64 * 96 + 128) + 2 * 2 * 64 + 64
    more = [f"--expect_params={size}", "--epochs=1", "--lr=3e-3", "--warmup=5", "--eval_every=40", "--compile=False", "--tag=mini"]
    project.ok("train.py", "config/bits_1b.py", *shape.split(), *more, ranks=4)
    run = json.loads((project.path / "results/bits_1b/V_s0_mini.json").read_text())
    assert run["parallel"] == "fsdp"
    assert [d["params_held"] for d in run["devices"]] == [pytest.approx(size / 4, rel=0.01)] * 4
    assert sum(d["params_held"] for d in run["devices"]) == size
    assert run["curve"][0]["val_loss"] == pytest.approx(0.693, abs=0.05)
    assert run["curve"][-1]["val_loss"] < 0.67


def test_bits_1b_sharded_over_four_fake_ranks():
    """The full 1,214,359,552 parameters: what each of 4 ranks would hold, by FSDP itself, without their memory."""
    code = """
import torch, torch.distributed as dist, train
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
train.WORLD = 4
cfg = train.load_config(["config/bits_1b.py"])
with torch.device("meta"):
    model = train.Transformer(cfg)
train.shard(model, cfg, torch.device("cpu"))
print(model.counts()["stored"], sum(p.to_local().numel() for p in model.parameters()))
"""
    from project import ROOT

    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    stored, held = map(int, done.stdout.split())
    assert stored == 1_214_359_552
    assert held == pytest.approx(stored / 4, rel=1e-4)
