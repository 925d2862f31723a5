"""verdict.py: every outcome, every rule broken one at a time, the statistics against known answers, figures, paper and status."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from project import ROOT

import guard
import verdict

KINDS = ("best", "final")


def run_of(bars: dict, arm: str, seed: int, best: float) -> dict:
    """A finished run of the nano rung on 2 GPUs whose lowest val loss is `best`, at step 195, and 0.111 more at the end."""
    steps = [*range(0, 311, 15), 311]
    ranks = [{"step_p50": 0.1, "gpu_percent": 97.0}, {"step_p50": 0.1, "gpu_percent": 98.0}]
    n = bars["arms"][arm]["n_layer"] + 1
    curve = [
        {"step": s, "tokens": s * 2048, "val_loss": best + abs(s - 195) * 0.111 / 116, "epoch": s / 15.6, "sec": s / 10, "rms": [0.02 * (1 + s / 100 * i) for i in range(n)], "ranks": ranks}
        for s in steps
    ]  # fmt: skip
    final, params = curve[-1]["val_loss"], bars["arms"][arm]["expect_params"]
    return {
        "arm": arm, "seed": seed, "name": f"{arm}_s{seed}", "rung": "nano", "tag": "", "status": "done", "params": params, "steps": 311, "step": 311,
        "config": {**bars["config"], **bars["arms"][arm], "arm": arm, "seed": seed, "tag": "", "decay_epochs": 0.0, "compile": False}, "curve": curve, "final_val": final,
        "bars_sha256": "B", "code": {"code_sha256": "C", "git_commit": None}, "data": {"train_sha256": "T", "val_sha256": "W", "unique_tokens": 32_000}, "order_sha256": f"O{seed}",
        "dtype": "float32", "attention": "math", "ckpt": "none", "parallel": "ddp", "flops_per_token": 2.2e6, "world_size": 2, "micro_batch": 8, "accum": 1,
        "devices": [{"name": "GPU", "uuid": u, "params_held": params} for u in "ab"], "sec": {"train": 31.1, "eval": 4.4, "save": 0.1},
        "best": {"step": 195, "val_loss": best, "sha256": f"{arm}{seed}best"}, "final": {"step": 311, "val_loss": final, "sha256": f"{arm}{seed}final"},
        "versions": {"torch": "2"}, "events": [{"time": "t", "event": "started: here", "step": 0}, {"time": "t", "event": "done", "step": 311}],
    }  # fmt: skip


def eval_of(run: dict, kind: str, points: float) -> dict:
    """An eval of 2 x 10,000 items with this many points on both tasks, 200 windows around the run's val loss, made by the arm's name."""
    tasks, val, rng = ("cloze", "lastword"), run[kind]["val_loss"], np.random.RandomState(len(run["arm"]) + run["seed"])
    right, noise = round(points * 100), rng.normal(0, 0.3, 200)
    return {
        "name": run["name"], "arm": run["arm"], "seed": run["seed"], "tag": "", "checkpoint": kind, "checkpoint_sha256": run[kind]["sha256"], "n_loop": run["config"]["n_loop"],
        "tasks": {t: {"metric": "acc", "value": right / 1e4, "n": 10_000, "version": 1.0} for t in tasks}, "items": {t: "1" * right + "0" * (10_000 - right) for t in tasks},
        "items_sha256": {t: "I" for t in tasks}, "gold_nll": {t: [round(val + 0.01 * i, 4) for i in range(20)] for t in tasks}, "mean": right / 100, "limit": None, "lm_eval": "0.4",
        "batch_policy": {"batch_tokens": 1}, "val": {"sha256": "W", "loss": val, "bits_per_byte": val / 0.69, "tokens_per_window": 128, "loss_sums": (128 * (val + noise - noise.mean())).tolist()}, "code_sha256": "E", "versions": {"torch": "2"},
    }  # fmt: skip


def add(data: dict, arm: str, seed: int, best: float, points: float) -> None:
    data["runs"][arm, seed] = run_of(data["bars"], arm, seed, best)
    data["evals"] |= {(arm, seed, kind): eval_of(data["runs"][arm, seed], kind, points) for kind in KINDS}


def record(gaps=((-0.03, 1.5), (-0.025, 1.0))) -> dict:
    """A whole, fair nano record with these (val, suite) gaps on seeds 0 and 1, its LR found by a probe."""
    bars = guard.read_json(ROOT / "config/bars_nano.json")
    probe = {"lr": 2e-3, "edge": False, "final_val": {"0.001": 3.2, "0.002": 3.1, "0.004": None}}
    data = {
        "bars": bars,
        "bars_sha256": "B",
        "folder": "nano",
        "runs": {},
        "evals": {},
        "probe": probe,
        "probes": {1e-3: 3.2, 2e-3: 3.1, 4e-3: None},
        "study": None,
    }
    for seed, (val, suite) in enumerate(gaps):
        add(data, "V", seed, 3.0, 40.0)
        add(data, "L", seed, 3.0 + val, 40.0 + suite)
    return data


def study(gaps=(-0.05, 0.01, 0.03, -0.02, -0.04)) -> dict:
    """A noise study of 5 seeds: L - V as given, L - VE half of it, L1 worse than V by 0.1."""
    data = record(())
    data |= {"bars": data["bars"] | {"seeds": [0, 1, 2, 3, 4]}, "folder": "nano_study"}
    for seed, gap in enumerate(gaps):
        for arm, best in (("V", 3.0), ("L", 3.0 + gap), ("VE", 3.0 + gap / 2), ("L1", 3.1)):
            add(data, arm, seed, best, 40.0 - 10 * gap * (arm == "L"))
    return data


def drop(data: dict, arm: str, seed: int) -> None:
    del data["runs"][arm, seed]
    for kind in KINDS:
        del data["evals"][arm, seed, kind]


def text_of(v: dict) -> str:
    return "\n".join("\n".join([name, *lines]) for name, lines in verdict.report(v))


# ---- outcomes ---------------------------------------------------------------------------------------------------------


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
    """To the rounding of doubles: of the means 100 x (a + b)/2 of tasks of 500 items, exactly one point apart, hundreds fall short by 1e-14."""
    data = record()
    data["bars"]["bars"] = {"val_gap_max": -0.03, "suite_gap_min": 1.0}
    means = [100 * (a / 500 + b / 500) / 2 for a in range(0, 400, 7) for b in range(0, 400, 11)]
    short = 0
    for low in means:
        high = 100 * ((low * 10 + 10) / 1000)
        data["evals"]["V", 0, "best"]["mean"], data["evals"]["L", 0, "best"]["mean"] = low, high
        short += high - low < 1.0
        assert verdict.seed_row(data, 0)["passes"]
    assert short > 10
    data["evals"]["L", 0, "best"]["mean"] = means[0] + 0.99
    data["evals"]["V", 0, "best"]["mean"] = means[0]
    assert not verdict.seed_row(data, 0)["passes"]


def test_one_failed_seed_decides_and_one_passed_does_not():
    for gap, word in ((0.03, "KILLED"), (-0.03, "INCOMPLETE")):
        data = record(((gap, 2.0),))
        got = verdict.decide(data)
        assert got["word"] == word
        assert len(got["missing"]) == 4
    assert "torchrun --standalone --nproc_per_node=2 train.py config/L_nano.py --seed=1 --lr=0.002 --resume=auto" in got["missing"]
    assert "python eval.py out/nano/V_s1/best.pt out/nano/V_s1/final.pt" in got["missing"]


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
    got = verdict.decide(data | {"probe": None})
    assert (got["word"], got["missing"]) == ("INCOMPLETE", ["bash run.sh probe nano"])
    assert verdict.decide(data)["word"] == "CONFIRMED"


def test_a_rung_without_suite_needs_no_evals():
    for gaps, word in ((((-0.03, 0.0), (-0.03, 0.0)), "CONFIRMED"), (((-0.03, 0.0), (0.03, 0.0)), "KILLED")):
        data = record(gaps)
        data["bars"]["tasks"], data["evals"] = {}, {}
        got = verdict.decide(data)
        assert got["word"] == word
        assert "suite" not in text_of(got) + "".join(verdict.primary(got)[:-1])


def test_sharded_runs_hold_their_share():
    for held, word in (([100, 100], "INVALID"), (None, "CONFIRMED")):
        data = record()
        for r in data["runs"].values():
            half = r["params"] // 2
            r.update(parallel="fsdp", devices=[{"uuid": u, "params_held": h} for u, h in zip("ab", held or [half, r["params"] - half])])
        assert verdict.decide(data)["word"] == word


# ---- rules ------------------------------------------------------------------------------------------------------------


def both(d: dict, arm: str) -> list[dict]:
    return [r for (a, _), r in d["runs"].items() if a == arm]


def all_rows(d: dict, **change) -> None:
    for row in d["runs"]["V", 1]["curve"]:
        row["ranks"][1].update(change)


BREAK = {
    "bars file": lambda d: d.update(bars_sha256="other"),
    "code identity": lambda d: d["runs"]["L", 0]["code"].update(code_sha256="other"),
    "train data": lambda d: d["runs"]["L", 0]["data"].update(train_sha256="other"),
    "val data": lambda d: d["runs"]["L", 0]["data"].update(val_sha256="other"),
    "lr as the probe": lambda d: d.update(probe=d["probe"] | {"lr": 1e-3}),
    "the probe's lr has its lowest loss": lambda d: d["probe"]["final_val"].update({"0.001": 3.0}),
    "the probe's losses are its runs'": lambda d: d["probes"].update({1e-3: 3.0}),
    "L eps": lambda d: [r["config"].update(eps=0.5) for r in both(d, "L")],
    "V n_loop": lambda d: [r["config"].update(n_loop=2) for r in both(d, "V")],
    "L n_layer": lambda d: [r["config"].update(n_layer=6) for r in both(d, "L")],
    "V expect_params": lambda d: [r["config"].update(expect_params=1) for r in both(d, "V")],
    "L parameters": lambda d: d["runs"]["L", 0].update(params=771_000_000),
    "seed 1: order": lambda d: d["runs"]["L", 1].update(order_sha256="other"),
    "eval steps": lambda d: d["runs"]["L", 0]["curve"].pop(3),
    "tokens trained": lambda d: [r["curve"][-1].update(tokens=1) for r in d["runs"].values()],
    "compute dtype": lambda d: d["runs"]["V", 1].update(dtype="bfloat16"),
    "activation checkpoints": lambda d: d["runs"]["V", 1].update(ckpt="all"),
    "parallel mode": lambda d: d["runs"]["V", 1].update(parallel="single"),
    "FLOPs": lambda d: [r.update(flops_per_token=2.3e6) for r in both(d, "L")],
    "untagged": lambda d: d["runs"]["L", 0].update(name="L_s0_lucky"),
    "untagged, and the run": lambda d: d["runs"]["L", 0]["config"].update(tag="e8"),
    "untagged, and the run it is named": lambda d: d["runs"]["L", 1].update(rung="flip"),
    "not continued": lambda d: d["runs"]["L", 0]["config"].update(decay_epochs=5.0),
    "no change forced": lambda d: d["runs"]["L", 0]["events"].insert(1, {"event": "forced: warmup was 30 and is 10", "step": 50}),
    "all steps done": lambda d: d["runs"]["V", 1].update(step=300),
    "final loss": lambda d: d["runs"]["L", 1].update(final_val=2.5),
    "best.pt is the lowest row": lambda d: d["runs"]["L", 0]["best"].update(step=210, val_loss=2.9844),
    "micro-batch": lambda d: d["runs"]["V", 1].update(accum=2),
    "share of the parameters": lambda d: d["runs"]["V", 1]["devices"][1].update(params_held=0),
    "a device a rank": lambda d: d["runs"]["V", 1]["devices"][1].update(uuid="a"),
    "every rank reports": lambda d: d["runs"]["V", 1]["curve"][4].update(ranks=[{}]),
    "no rank idle": lambda d: all_rows(d, gpu_percent=3.0),
    "rank idle": lambda d: [row.update(ranks=[row["ranks"][0], {"step_p50": 0.1}]) for row in d["runs"]["V", 1]["curve"][3:]],
    "device a rank": lambda d: d["runs"]["V", 1]["devices"][1].update(uuid=None),
    "of the run it is named": lambda d: d["evals"]["L", 0, "best"].update(name="L_s1"),
    "of the run it is": lambda d: d["evals"]["L", 0, "best"].update(checkpoint="final"),
    "registered tasks": lambda d: d["evals"]["L", 0, "best"]["tasks"].pop("cloze"),
    "the registered tasks": lambda d: d["evals"]["L", 0, "best"]["tasks"]["cloze"].update(metric="acc_norm"),
    "the mean is that of its items": lambda d: d["evals"]["L", 0, "best"].update(mean=43.0),
    "the mean is that of its": lambda d: d["evals"]["L", 0, "best"]["items"].pop("cloze"),
    "mean is that of its items": lambda d: d["evals"]["V", 0, "final"]["items"].update(cloze="1" * 4000),
    "loops as trained": lambda d: d["evals"]["L", 0, "best"].update(n_loop=3),
    "the very checkpoint": lambda d: d["evals"]["L", 0, "best"].update(checkpoint_sha256="other"),
    "val loss scored again": lambda d: d["evals"]["L", 0, "best"]["val"].update(loss=3.1),
    "full sets": lambda d: d["evals"]["L", 0, "best"].update(limit=50),
    "lm-eval version": lambda d: d["evals"]["L", 0, "best"].update(lm_eval="0.5"),
    "evals: code": lambda d: d["evals"]["L", 0, "best"].update(code_sha256="other"),
    "evals: seed 0: torch": lambda d: d["evals"]["L", 0, "best"]["versions"].update(torch="3"),
    "val windows add up": lambda d: d["evals"]["L", 0, "best"]["val"]["loss_sums"].append(0.0),
    "attention kernel": lambda d: d["runs"]["V", 1].update(attention="flash_attention"),
    "compiled": lambda d: d["runs"]["V", 1]["config"].update(compile=True),
    "seed 1: torch": lambda d: d["runs"]["V", 1]["versions"].update(torch="3"),
    "the probe covers its grid": lambda d: d["bars"].update(lr_grid=[1e-3, 2e-3, 4e-3, 8e-3]),
    "batch policy": lambda d: d["evals"]["L", 0, "best"].update(batch_policy={"batch_tokens": 2}),
    "the same items": lambda d: d["evals"]["L", 0, "best"]["items_sha256"].update(cloze="other"),
    "task versions": lambda d: d["evals"]["L", 0, "best"]["tasks"]["cloze"].update(version=2.0),
    "the val set trained against": lambda d: d["evals"]["L", 0, "best"]["val"].update(sha256="other"),
}
BREAK |= {f"config {key}": lambda d, key=key: d["runs"]["L", 1]["config"].update({key: "other"}) for key in record()["bars"]["config"]}


@pytest.mark.parametrize("rule", BREAK)
def test_each_rule_bites(rule):
    data = record()
    BREAK[rule](data)
    got = verdict.decide(data)
    assert got["word"] == "INVALID"
    broken = [name for name, status, _ in got["audit"] if status == "fail"]
    assert any(rule in name for name in broken), broken
    assert rule in got["why"] or len(broken) > 1


def test_no_rule_without_its_test():
    for name, status, _ in verdict.decide(record())["audit"]:
        assert status == "pass", name
        assert any(rule.removeprefix("L ").removeprefix("V ").removeprefix("seed 1") in name for rule in BREAK), name


def strip(obj, key: str) -> None:
    """Remove a key wherever it is."""
    for x in obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list) else ():
        strip(x, key)
    if isinstance(obj, dict):
        obj.pop(key, None)


@pytest.mark.parametrize("key", ["bars_sha256", "code", "data", "order_sha256", "dtype", "devices", "best", "flops_per_token", "rung", "micro_batch"])
def test_what_is_not_recorded_fails(key):
    """A record of an old schema is no valid one, and no crash."""
    data = record()
    for run in data["runs"].values():
        run.pop(key)
    assert verdict.decide(data)["word"] == "INVALID"


def test_what_evals_do_not_record():
    """Without the right answers' likelihoods a column is n/a; without the loops, or the code, nothing is known of the score."""
    data = record()
    strip({"evals": list(data["evals"].values())}, "gold_nll")
    got = verdict.decide(data)
    assert got["word"] == "CONFIRMED"
    assert "n/a" in text_of(got)
    for key in ("n_loop", "code_sha256", "seed"):
        data = record()
        data["evals"]["L", 1, "best"].pop(key)
        assert verdict.decide(data)["word"] == ("CONFIRMED" if key == "seed" else "INVALID")


def test_seeds_on_two_nodes_and_resumes_are_valid():
    """Another node for seed 1, another number of ranks after a resume, events of a run before this one: none of it is unfair."""
    data = record()
    for arm in ("V", "L"):
        run = data["runs"][arm, 1]
        run.update(dtype="bfloat16", attention="flash_attention", versions={"torch": "3"}, ckpt="all")
        for kind in KINDS:
            data["evals"][arm, 1, kind].update(batch_policy={"batch_tokens": 1, "device": "other"}, versions={"torch": "3"}, world_size=8)
        run["events"][:0] = [{"event": "started: before", "step": 0}, {"event": "forced: lr was 1 and is 2", "step": 9}]
    run = data["runs"]["L", 1]
    run["events"].insert(-1, {"event": "resumed: on two", "step": 150})
    for row in run["curve"]:
        row["ranks"] = row["ranks"][: 1 if row["step"] <= 150 else 2]
    got = verdict.decide(data)
    assert got["word"] == "CONFIRMED", got["why"]
    assert "a run was resumed" in text_of(got)


def test_half_a_lr_or_a_flop_is_not_passed_over():
    data = record(((0.03, 1.5), (0.03, 1.5)))
    data["bars"]["lr_grid"] = [1e-3, 2e-3, 4e-3]
    assert verdict.decide(data | {"probe": None})["word"] == "INCOMPLETE", "no probe, no verdict"
    data = record()
    data["runs"]["L", 0].pop("flops_per_token")
    assert verdict.decide(data)["word"] == "INVALID"


def test_the_seeds_disagree():
    why = verdict.decide(record(((-0.06, 1.5), (0.04, 1.5))))["why"]
    assert "the seeds disagree" in why
    assert "-0.0600, +0.0400" in why


def test_a_changed_bars_file_is_named(monkeypatch):
    """By key from git; where the commit does not hold that file, by the run's own config."""
    old = json.loads((ROOT / "config/bars_nano.json").read_text())
    old["bars"]["val_gap_max"] = -0.01
    text = json.dumps(old)
    data = record()
    for run in data["runs"].values():
        run["code"]["git_commit"] = "abcdef1"
        run["bars_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        run["config"]["warmup"] = 31
    monkeypatch.setattr(guard, "git", lambda *args: text if args == ("show", "abcdef1:config/bars_nano.json") else None)
    assert "bars.val_gap_max -0.01 -> -0.02" in verdict.decide(data)["why"]
    monkeypatch.setattr(guard, "git", lambda *args: None)
    why = verdict.decide(data)["why"]
    assert "warmup 31 -> 30" in why
    assert "B" in why
    assert data["runs"]["V", 0]["bars_sha256"] in why


def test_cpu_devices_are_not_claimed():
    data = record()
    for r in data["runs"].values():
        r.update(devices=[{"uuid": None, "params_held": r["params"]}], world_size=1, micro_batch=16)
        for row in r["curve"]:
            row["ranks"] = [{"step_p50": 0.1}]
    got = verdict.decide(data)
    assert {status for name, status, _ in got["audit"] if any(w in name for w in ("device a rank", "idle", "share", "reports"))} == {"n/a"}
    assert got["word"] == "CONFIRMED"
    assert "no measure" in text_of(got)


def test_control_arms_never_touch_the_verdict():
    """Absent: nothing is missing. Fair: used. Unfair: left out by name, and the primary stands."""
    data = record()
    for seed in (0, 1):
        add(data, "VE", seed, 2.99, 40.5)
        add(data, "L1", seed, 3.02, 39.0)
    got = verdict.decide(data)
    assert (got["word"], got["excluded"]) == ("CONFIRMED", {})
    said = text_of(got)
    assert "| L - VE" in said
    assert "not attributable" in said  # L - VE = -0.0175, above the bar of -0.02
    data["runs"]["VE", 1]["config"]["lr"] = 1e-3
    got = verdict.decide(data)
    assert got["word"] == "CONFIRMED"
    assert list(got["excluded"]) == ["VE"]
    said = text_of(got)
    assert "VE is left out, it breaks a rule: config lr" in said
    assert "| L - VE" not in said
    assert "| L1 - V" in said
    assert "not attributable" not in said


# ---- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap, p", [(0, 0.00), (-0.02, 0.01), (-0.03, 0.08), (-0.05, 0.25), (-0.08, 0.65), (-0.10, 0.85)])
def test_power_known_answers(gap, p):
    bars = guard.read_json(ROOT / "config/bars_1b.json")
    noise = {"val": verdict.NOISE_SD, "suite": verdict.SUITE_SD}
    assert verdict.power(gap, bars, noise, 2) == pytest.approx(p, abs=0.01)
    rng = np.random.RandomState(1)  # the same model, by simulation
    val, suite = gap + rng.normal(0, 0.003, (2, 200_000)), -20 * gap + rng.normal(0, 0.7, (2, 200_000))
    assert ((val <= -0.02) & (suite >= 1.0)).all(0).mean() == pytest.approx(verdict.power(gap, bars, noise, 2), abs=0.005)


def coverage(block: int, offset: int = 0) -> float:
    """Share of 200 simulated paired sets of 400 windows whose interval holds the truth; 4 windows share an effect, ICC 0.3, from this offset on."""
    rng, held = np.random.RandomState(0), 0
    for _ in range(200):
        effect = np.repeat(rng.normal(0, 0.3**0.5, 101), 4)[offset:][:400]
        low, high = verdict.block_bootstrap(0.1 + effect + rng.normal(0, 0.7**0.5, 400), block, draws=800)
        held += low <= 0.1 <= high
    return held / 200


def test_the_block_bootstrap_covers_and_the_iid_one_does_not():
    """95.5% and 83.5%. Where the shared stretches start in mid-block the block bootstrap is too narrow as well (87.5% at the worst offset), less so than the other."""
    iid, worst = coverage(1), coverage(4, offset=2)
    assert 0.90 <= coverage(4) <= 0.99
    assert iid < 0.90
    assert iid < worst < 0.90


def test_item_bootstrap_equals_resampling_the_items():
    rng = np.random.RandomState(3)
    tasks = [rng.choice([-1, 0, 1], p=p, size=n) for p, n in (((0.1, 0.7, 0.2), 500), ((0.05, 0.94, 0.01), 2000))]
    means = [100 * np.mean([rng.choice(d, len(d)).mean() for d in tasks]) for _ in range(4000)]
    assert verdict.item_bootstrap(tasks) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.25)


def test_mcnemar_and_holm():
    won, lost = 9, 2
    d = np.array([1] * won + [-1] * lost + [0] * 50)
    assert verdict.mcnemar(d) == pytest.approx(2 * sum(math.comb(11, k) for k in range(lost + 1)) / 2**11)
    assert verdict.mcnemar(np.zeros(5)) == 1
    assert verdict.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # Holm 1979
    assert verdict.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_sd_interval():
    """n = 5: 0.599 and 2.874 times the sd (tables of chi-square with 4 degrees: 11.143, 0.4844)."""
    assert verdict.sd_interval(1.0, 5) == pytest.approx((0.5991, 2.8736), abs=2e-4)


def test_the_study_measures_the_noise():
    gaps = (-0.05, 0.01, 0.03, -0.02, -0.04)
    data = record(((0.03, 1.5), (0.03, 1.5)))
    assert "L is worse" in verdict.decide(data)["why"]
    data["study"] = study(gaps)
    got = verdict.decide(data)
    assert got["noise"]["val"] == pytest.approx(np.std(gaps, ddof=1))
    assert got["noise"]["suite"] == pytest.approx(10 * np.std(gaps, ddof=1))
    assert "no difference seen" in got["why"]  # 0.03 is within twice the measured noise
    assert "measured noise" in got["why"]
    said = text_of(got)
    assert "By the runs of the study (results/nano_study), seeds 0, 1, 2, 3, 4" in said
    row = next(line for line in said.splitlines() if line.startswith("| L - VE"))
    assert f"{np.mean(gaps) / 2:+.4f}" in row
    sums = {a: float(next(line for line in said.splitlines() if line.startswith(f"| {a} ")).split("|")[4]) for a in ("L - V", "L - VE", "VE - V")}
    assert sums["L - V"] == pytest.approx(sums["L - VE"] + sums["VE - V"], abs=2e-4)


@pytest.mark.parametrize(
    "hurt, word",
    [
        (lambda s: drop(s, "L1", 4), "2 runs or evals of it are missing (bash run.sh nano_study)"),
        (lambda s: s["runs"]["VE", 3].update(order_sha256="other"), "it breaks a rule, seed 3: order of data"),
        (lambda s: [r["code"].update(code_sha256="other") for r in s["runs"].values()], "its code.code_sha256 is not the record's"),
        (lambda s: s["runs"]["V", 3].update(status="running"), "1 runs or evals of it are missing"),
    ],
)
def test_a_partial_or_unfair_study_is_not_used(hurt, word):
    data = record() | {"study": study()}
    hurt(data["study"])
    got = verdict.decide(data)
    assert got["word"] == "CONFIRMED"
    assert got["noise"]["val"] == verdict.NOISE_SD
    assert word in text_of(got)


def test_wall_clock_only_where_it_can_be_compared():
    """L takes half of V's seconds: V is read at L's end, on the straight line between its rows."""
    data = record()
    for (arm, _), run in data["runs"].items():
        for row in run["curve"]:
            row["sec"] = row["step"] * (1.0 if arm == "V" else 0.5)
    a, b = data["runs"]["L", 0], data["runs"]["V", 0]
    at = 3.0 + (195 - 155.5) * 0.111 / 116
    assert verdict.wall_clock_gap(a, b) == pytest.approx(2.97 - at)
    assert verdict.comparable_clock(a, b) == ""
    assert f"seed 0: {2.97 - at:+.4f} nats" in text_of(verdict.decide(data))
    for change in ({"ckpt": "all"}, {"micro_batch": 4}, {"parallel": "fsdp"}, {"devices": [{"name": "other", "uuid": "c"}] * 2}):
        assert " and " in verdict.comparable_clock(a | change, b)


def test_three_loops_and_the_forecast():
    data = record()
    data["bars"] = guard.read_json(ROOT / "config/bars_1b.json") | {k: data["bars"][k] for k in ("config", "tasks", "rung")}
    data["runs"], data["evals"], data["bars"]["gate"], data["bars"]["lr_grid"] = {}, {}, "", [1e-3, 2e-3, 4e-3]
    for seed in (0, 1):
        for arm, best in (("V", 3.0), ("L", 2.96), ("L3", 2.95)):
            add(data, arm, seed, best, 42.0 if arm == "L" else 40.0)
    got = verdict.decide(data)
    said = text_of(got)
    assert got["word"] == "CONFIRMED"
    assert "L3 8 x 3 610,830,336" in said
    assert next(line for line in said.splitlines() if line.startswith("| L3 - L ")).split("|")[4].strip() == "-0.0100"
    assert "forecast +0.03 +- 0.02 nats; outcome -0.0400, -3.5 sd from it" in said


# ---- figures, paper, status -------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Another folder in which verdict.py finds and writes everything."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    shutil.copy(ROOT / "PAPER.md", tmp_path)
    monkeypatch.setattr(guard, "HERE", tmp_path)
    return tmp_path


def put(data: dict, place) -> None:
    """Write a synthetic record as files, with the true hash of the bars file."""
    sha = guard.sha256_file(place / "config/bars_nano.json")
    for (arm, seed), run in data["runs"].items():
        guard.write_json(place / f"results/{data['folder']}/{arm}_s{seed}.json", run | {"bars_sha256": sha})
    for (arm, seed, kind), e in data["evals"].items():
        guard.write_json(place / f"evals/{data['folder']}/{arm}_s{seed}_{kind}.json", e)


def run_main(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verdict.py", *args])
    try:
        return verdict.main() or 0
    except SystemExit as e:
        return e.code


def test_the_same_paper_and_figures_twice(place, monkeypatch, capsys):
    put(record(), place)
    put(study(), place)
    before = (place / "PAPER.md").read_text()
    assert run_main(monkeypatch, "nano", "--paper") == 0
    files = [place / "PAPER.md", *(place / f"results/nano/{f}.png" for f in ("curves", "gap", "tasks", "rms"))]
    first = [(f.read_bytes(), f.stat().st_mtime_ns) for f in files]
    assert run_main(monkeypatch, "nano", "--paper") == 0
    assert [(f.read_bytes(), f.stat().st_mtime_ns) for f in files] == first
    assert "PAPER.md: rung nano unchanged" in capsys.readouterr().out
    paper = first[0][0].decode()
    assert "**CONFIRMED.**" in paper
    assert "](results/nano/gap.png)" in paper
    outside = lambda text: (text.split("<!-- begin: nano -->")[0], text.split("<!-- end: nano -->")[1])
    assert outside(paper) == outside(before)
    assert run_main(monkeypatch, "1b", "--paper") == 0
    assert "**Not yet run.**" in (place / "PAPER.md").read_text().split("<!-- begin: 1b -->")[1].split("<!-- end: 1b -->")[0]
    (place / "PAPER.md").write_text("nothing to write between\n")
    assert "no pair of lines" in str(run_main(monkeypatch, "nano", "--paper"))
    assert (place / "PAPER.md").read_text() == "nothing to write between\n"


def test_an_invalid_record_gets_no_number(place, monkeypatch, capsys):
    data = record()
    data["runs"]["L", 0]["params"] = 1
    put(data, place)
    assert run_main(monkeypatch, "nano") == 1
    out = capsys.readouterr().out
    assert "INVALID: " in out
    assert "Beside" not in out
    assert "2.97" not in out
    assert not list(place.rglob("*.png"))


def test_a_run_killed_before_its_first_row(place, monkeypatch, capsys):
    data = record()
    data["runs"] = {("V", 1): data["runs"]["V", 1] | {"status": "running", "curve": [], "final_val": None}}
    put(data | {"evals": {}}, place)
    assert run_main(monkeypatch, "nano") == 1
    assert "INCOMPLETE" in capsys.readouterr().out
    assert not list(place.rglob("*.png"))


@pytest.mark.parametrize("text", ['{"arm": "V", "seed"', "[]", '{"arm": "V"}'])
def test_a_broken_file_is_named(place, monkeypatch, capsys, text):
    put(record(), place)
    (place / "results/nano/V_s0.json").write_text(text)
    assert "results/nano/V_s0.json: not" in run_main(monkeypatch, "nano")
    assert run_main(monkeypatch, "status", "nano") == 0
    assert "unreadable" in capsys.readouterr().out


def test_status(place, monkeypatch, capsys):
    """Done, running with an ETA by its own rate, dead, not started; tagged runs apart."""
    data = record()
    half = data["runs"]["L", 0]
    half |= {"status": "running", "step": 150, "curve": half["curve"][:11], "sec": {"train": 1500.0, "eval": 110.0, "save": 1.0}}
    del data["runs"]["V", 1]
    put(data, place)
    guard.write_json(place / "results/nano/V_s0_lr0.001.json", data["runs"]["V", 0])
    assert run_main(monkeypatch, "status", "nano") == 0
    registered, others = capsys.readouterr().out.split("tagged or other runs")
    lines = {line.split("|")[1].strip(): line for line in registered.splitlines() if line.startswith("|")}
    assert [lines[k].split("|")[2].strip() for k in ("V_s0", "L_s0", "V_s1")] == ["done", "running", "not started"]
    assert "150/311 48%" in lines["L_s0"]
    left = 161 * 10 + (161 // 15 + 1) * 10  # seconds
    assert f"{left // 60}m{left % 60:02}s" in lines["L_s0"]
    assert "V_s0_lr0.001" in others
    old = (place / "results/nano/L_s0.json").stat().st_mtime - 7200
    os.utime(place / "results/nano/L_s0.json", (old, old))
    assert run_main(monkeypatch, "status") == 0
    out = capsys.readouterr().out
    assert "silent: dead?" in out
    assert "1b (role target)" in out
    assert "neither a rung" in run_main(monkeypatch, "status", "2b")


def test_a_replica_beside_the_record(place, monkeypatch, capsys):
    put(record(), place)
    put(record(((0.03, 1.5), (0.03, 1.5))) | {"folder": "replica_nano"}, place)
    assert run_main(monkeypatch, "nano", "--folder=replica_nano") == 0
    out = capsys.readouterr().out
    assert "the record (results/nano): CONFIRMED" in out
    assert "code   the same as the record" in out
    assert "holds the record only" in run_main(monkeypatch, "nano", "--folder=replica_nano", "--paper")


# ---- what is committed ------------------------------------------------------------------------------------------------


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


def test_the_committed_record(capsys):
    """results/nano and evals/nano give a verdict by themselves; INVALID only where the bars file has changed since, and that alone."""
    data = verdict.load_rung("nano", "nano")
    got = verdict.decide(data)
    moved = {r["bars_sha256"] for r in data["runs"].values()} != {data["bars_sha256"]}
    assert [name for name, status, _ in got["audit"] if status == "fail"] == ["bars file as at each run's start"] * moved
    assert got["word"] in (("INVALID",) if moved else ("CONFIRMED", "KILLED")), got["why"]
    verdict.print_verdict(got, verbose=True)
    assert "a check of the plumbing, says nothing about 1B" in capsys.readouterr().out
    data["bars_sha256"] = next(iter(data["runs"].values()))["bars_sha256"]
    assert verdict.decide(data)["word"] in ("CONFIRMED", "KILLED")


def test_the_committed_paper_is_what_the_record_says(place, monkeypatch):
    """`verdict.py <rung> --paper` on the committed files changes nothing in the committed PAPER.md."""
    for folder in ("results", "evals"):
        shutil.copytree(ROOT / folder, place / folder)
    git = lambda *args: subprocess.run(["git", "-C", str(ROOT), *args], check=False, capture_output=True, text=True)
    monkeypatch.setattr(guard, "git", lambda *args: done.stdout if (done := git(*args)).returncode == 0 else None)
    for rung in ("nano", "flip", "400m", "1b"):
        run_main(monkeypatch, rung, "--paper")
    assert (place / "PAPER.md").read_text() == (ROOT / "PAPER.md").read_text()


@pytest.mark.parametrize("rung", ["flip", "400m", "1b"])
def test_a_rung_not_run_at_all(rung, capsys):
    """INCOMPLETE with the commands; forecast and power stand before any run."""
    got = verdict.decide(verdict.load_rung(rung, rung))
    if got["data"]["runs"]:
        pytest.skip(f"{rung} has been run")
    verdict.print_verdict(got)
    out = capsys.readouterr().out
    assert got["word"] == "INCOMPLETE"
    assert "no outcome yet" in out
    assert "P(pass)" in out
    assert f"config/L_{rung}.py --seed=1" in out


def test_bad_rung():
    done = subprocess.run([sys.executable, "verdict.py", "2b"], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert json.loads((ROOT / "config/bars_nano.json").read_text())["role"] == "plumbing"
