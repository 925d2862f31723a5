"""verdict.py: the published figures from the published curves, every outcome, every rule broken one at a time."""

import copy
import json
import subprocess
import sys

import pytest
from project import ROOT

import guard
import verdict


def run_of(bars: dict, arm: str, seed: int, best: float) -> dict:
    curve = [{"step": s, "tokens": s * 2048, "val_loss": best + abs(s - 200) / 1000, "epoch": s / 15} for s in range(0, 312, 15)] + [
        {"step": 311, "tokens": 311 * 2048, "val_loss": best + 0.111, "epoch": 20.0}
    ]
    curve[13]["val_loss"] = best
    return {
        "arm": arm, "seed": seed, "name": f"{arm}_s{seed}", "tag": "", "status": "done", "params": bars["arms"][arm]["expect_params"], "steps": 311, "step": 311,
        "config": {**bars["config"], **bars["arms"][arm], "arm": arm, "seed": seed}, "curve": curve, "final_val": best + 0.111,
        "bars_sha256": "B", "code": {"code_sha256": "C"}, "data": {"train_sha256": "T", "val_sha256": "W", "unique_tokens": 32_000}, "order_sha256": f"O{seed}",
        "dtype": "float32", "ckpt": "none", "parallel": "ddp", "flops_per_token": 2.2e6, "world_size": 2, "devices": [{"uuid": u, "params_held": bars["arms"][arm]["expect_params"]} for u in "ab"],
        "best": {"sha256": f"{arm}{seed}best"}, "final": {"sha256": f"{arm}{seed}final"}, "versions": {"torch": "2"},
    }  # fmt: skip


def eval_of(bars: dict, arm: str, seed: int, kind: str, mean: float) -> dict:
    return {
        "checkpoint_sha256": f"{arm}{seed}{kind}", "tasks": {t: {} for t in bars["tasks"]}, "mean": mean, "limit": None, "lm_eval": "0.4",
        "batch_policy": {"batch_tokens": 1}, "items_sha256": {t: "I" for t in bars["tasks"]}, "val": {"sha256": "W"},
    }  # fmt: skip


def record(gaps=((-0.03, 1.5), (-0.025, 1.0))) -> dict:
    """A whole, fair nano record with these (val, suite) gaps on seeds 0 and 1."""
    bars = guard.read_json(ROOT / "config/bars_nano.json")
    runs, evals = {}, {}
    for seed, (val, suite) in enumerate(gaps):
        for arm, best, mean in (("V", 3.0, 40.0), ("L", 3.0 + val, 40.0 + suite)):
            runs[arm, seed] = run_of(bars, arm, seed, best)
            for kind in ("best", "final"):
                evals[arm, seed, kind] = eval_of(bars, arm, seed, kind, mean)
    return {"bars": bars, "bars_sha256": "B", "folder": "nano", "runs": runs, "evals": evals, "probe": None}


@pytest.mark.parametrize(
    "gaps, word, why",
    [
        (((-0.03, 1.5), (-0.03, 1.5)), "CONFIRMED", "every seed"),
        (((-0.021, 1.0), (-0.03, 1.0)), "CONFIRMED", "every seed"),
        (((-0.03, 1.5), (-0.03, 0.99)), "KILLED", "misses the suite bar on seed 1"),
        (((-0.03, 1.5), (-0.0199, 1.5)), "KILLED", "misses a bar on seed 1"),
        (((0.03, 1.5), (0.03, 1.5)), "KILLED", "L is worse than V"),
        (((0.003, 1.5), (-0.003, 1.5)), "KILLED", "no difference seen"),
    ],
)
def test_outcomes(gaps, word, why):
    got = verdict.decide(record(gaps))
    assert (got["word"], why in got["why"]) == (word, True), got["why"]
    assert not [c for c in got["audit"] if c[1] == "fail"]


def test_bars_are_inclusive():
    data = record()
    data["bars"]["bars"] = {"val_gap_max": data["runs"]["L", 0]["curve"][13]["val_loss"] - 3.0, "suite_gap_min": 1.5}
    assert verdict.seed_row(data, 0)["passes"]


def test_one_failed_seed_decides_and_one_passed_does_not():
    for gap, word in ((0.03, "KILLED"), (-0.03, "INCOMPLETE")):
        data = record(((gap, 2.0), (-0.03, 2.0)))
        for arm in ("V", "L"):
            del data["runs"][arm, 1]
            for kind in ("best", "final"):
                del data["evals"][arm, 1, kind]
        got = verdict.decide(data)
        assert got["word"] == word
        assert len(got["missing"]) == 4
    assert any("config/L_nano.py --seed=1" in c for c in got["missing"])
    assert any("eval.py out/nano/V_s1/best.pt out/nano/V_s1/final.pt" in c for c in got["missing"])


def test_missing_eval_or_unfinished_run_is_incomplete():
    data = record()
    del data["evals"]["L", 0, "final"]
    assert verdict.decide(data)["missing"] == ["python eval.py out/nano/L_s0/final.pt"]
    data = record()
    data["runs"]["V", 1]["status"] = "preempted"
    assert verdict.decide(data)["word"] == "INCOMPLETE"


def test_a_rung_with_a_grid_needs_its_probe():
    data = record()
    data["bars"]["lr_grid"] = [1e-3, 2e-3, 4e-3]
    got = verdict.decide(data)
    assert (got["word"], got["missing"]) == ("INCOMPLETE", ["bash run.sh probe nano"])
    for lr, word in ((2e-3, "CONFIRMED"), (1e-3, "INVALID")):
        assert verdict.decide(data | {"probe": {"lr": lr}})["word"] == word


def test_sharded_runs_hold_their_share():
    for held, word in (([100, 100], "INVALID"), (None, "CONFIRMED")):
        data = record()
        for r in data["runs"].values():
            half = r["params"] // 2
            r.update(parallel="fsdp", devices=[{"uuid": u, "params_held": h} for u, h in zip("ab", held or [half, r["params"] - half])])
        assert verdict.decide(data)["word"] == word


def test_a_rung_without_suite_needs_no_evals():
    data = record(((-0.03, 0.0), (-0.03, 0.0)))
    data["bars"]["tasks"], data["evals"] = {}, {}
    assert verdict.decide(data)["word"] == "CONFIRMED"
    data = record(((-0.03, 0.0), (0.03, 0.0)))
    data["bars"]["tasks"], data["evals"] = {}, {}
    assert verdict.decide(data)["word"] == "KILLED"


def test_a_run_killed_before_its_first_row_is_incomplete(tmp_path):
    data = record()
    data["runs"]["V", 1].update(status="running", curve=[])
    data["runs"] = {("V", 1): data["runs"]["V", 1]}
    verdict.draw_curves(data, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert verdict.decide(data)["word"] == "INCOMPLETE"


BREAK = {
    "bars file": lambda d: d.update(bars_sha256="other"),
    "code identity": lambda d: d["runs"]["L", 0]["code"].update(code_sha256="other"),
    "config lr": lambda d: d["runs"]["L", 1]["config"].update(lr=1e-3),
    "lr as the probe": lambda d: d.update(probe={"lr": 1e-3}),
    "config warmup": lambda d: [r["config"].update(warmup=31) for r in d["runs"].values()],
    "config epochs": lambda d: d["runs"]["V", 0]["config"].update(epochs=8.0),
    "L eps": lambda d: [d["runs"]["L", s]["config"].update(eps=0.5) for s in (0, 1)],
    "L parameters": lambda d: d["runs"]["L", 0].update(params=771_000_000),
    "untagged": lambda d: d["runs"]["L", 0].update(name="L_s0_lucky"),
    "train data": lambda d: d["runs"]["L", 0]["data"].update(train_sha256="other"),
    "val data": lambda d: d["runs"]["L", 0]["data"].update(val_sha256="other"),
    "seed 1: order": lambda d: d["runs"]["L", 1].update(order_sha256="other"),
    "eval steps": lambda d: d["runs"]["L", 0]["curve"].pop(3),
    "all steps done": lambda d: d["runs"]["V", 1].update(step=300),
    "compute dtype": lambda d: d["runs"]["V", 1].update(dtype="bfloat16"),
    "FLOPs": lambda d: [d["runs"]["L", s].update(flops_per_token=2.3e6) for s in (0, 1)],
    "a device a rank": lambda d: d["runs"]["V", 1]["devices"][1].update(uuid="a"),
    "share of the parameters": lambda d: d["runs"]["V", 1]["devices"][1].update(params_held=0),
    "activation checkpoints": lambda d: d["runs"]["V", 1].update(ckpt="all"),
    "parallel mode": lambda d: [d["runs"]["V", 1].update(parallel="single")],
    "the very checkpoint": lambda d: d["evals"]["L", 0, "best"].update(checkpoint_sha256="other"),
    "registered tasks": lambda d: d["evals"]["L", 0, "best"]["tasks"].pop("cloze"),
    "full sets": lambda d: d["evals"]["L", 0, "best"].update(limit=50),
    "lm-eval version": lambda d: d["evals"]["L", 0, "best"].update(lm_eval="0.5"),
    "batch policy": lambda d: d["evals"]["L", 0, "best"].update(batch_policy={"batch_tokens": 2}),
    "the same items": lambda d: d["evals"]["L", 0, "best"]["items_sha256"].update(cloze="other"),
    "the val set trained against": lambda d: d["evals"]["L", 0, "best"]["val"].update(sha256="other"),
}


@pytest.mark.parametrize("rule", BREAK)
def test_each_rule_bites(rule):
    data = copy.deepcopy(record())
    BREAK[rule](data)
    got = verdict.decide(data)
    assert got["word"] == "INVALID"
    broken = [name for name, status, _ in got["audit"] if status == "fail"]
    assert any(rule in name for name in broken), broken
    assert rule in got["why"] or len(broken) > 1


def test_cpu_devices_are_not_claimed():
    data = record()
    for r in data["runs"].values():
        r.update(devices=[{"uuid": None, "params_held": r["params"]}], world_size=1)
    got = verdict.decide(data)
    assert {status for name, status, _ in got["audit"] if "device a rank" in name} == {"n/a"}
    assert got["word"] == "CONFIRMED"


def test_published_figures():
    """The figures that the authors of the small-scale campaign published, to 4 decimals, from their files unchanged."""
    done = subprocess.run([sys.executable, "verdict.py", "tests/upstream"], check=True, cwd=ROOT, capture_output=True, text=True)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:]}
    best = {"A768_s7": 4.6831, "A768_s13": 4.6837, "A768_s29": 4.6775, "C768_s7": 4.6438, "C768_s13": 4.6481, "C768_s29": 4.6352}
    assert {k: float(lines[f"epoch39_{k}"][2]) for k in best} == best
    assert {s: lines[f"epoch39_C768_{s}"][6] for s in ("s7", "s13", "s29")} == {"s7": "-0.0393", "s13": "-0.0356", "s29": "-0.0423"}
    assert float(lines["epoch39_A768_s7"][5]) == pytest.approx(1.473, abs=5e-4)
    assert float(lines["epoch39_C768_s7"][5]) == pytest.approx(0.821, abs=5e-4)
    assert lines["epoch39_C_s7"][6] == "+0.0137"


def test_the_committed_record_stands(capsys):
    """results/nano and evals/nano give a verdict (any), without the checkpoints."""
    data = verdict.load_rung("nano", "nano")
    got = verdict.decide(data)
    assert got["word"] in ("CONFIRMED", "KILLED"), got["why"]
    verdict.print_verdict(got, data, verbose=True)
    assert "a check of the plumbing, says nothing about 1B" in capsys.readouterr().out


def test_bad_rung():
    done = subprocess.run([sys.executable, "verdict.py", "2b"], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert json.loads((ROOT / "config/bars_nano.json").read_text())["role"] == "plumbing"
