"""results/ and evals/ of a rung -> audit, verdict, statistics, figures, paper. Reads those files and config/bars_<rung>.json only; trains nothing.

    python verdict.py nano                              # the record
    python verdict.py nano --audit                      # with every rule, pass or fail or n/a, and what was seen
    python verdict.py nano --paper                      # the rung's part of PAPER.md and its figures, made anew
    python verdict.py nano --folder=replica_nano        # one's own replication, the record beside it
    python verdict.py status                            # what every run is doing; status nano: of one rung
    python verdict.py path/to/published/curves          # a folder of published curves: best, final, gaps
    python verdict.py 1b --probe                        # picks the LR from the rung's finished probes, writes lr_probe.json
    python verdict.py 400m --word                       # the one word, for scripts

One of CONFIRMED, KILLED (by how), INCOMPLETE (with the commands that supply what is missing), INVALID (the rule broken, and no other
number). Exit code 0 for the first two, 1 for the others.
"""

import argparse
import hashlib
import io
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
from scipy import stats

import guard
from guard import Refusal

COLOURS = {"V": "#0072B2", "L": "#D55E00", "VE": "#009E73", "L1": "#CC79A7", "L3": "#E69F00", "L05": "#56B4E9"}  # Okabe and Ito, colour-blind safe
LINES, MARKS = ("-", "--", ":", "-."), ("o", "D", "s", "^")  # a seed each
NOISE_SD, SUITE_SD = 0.003, 0.7  # assumed sd between seeds of the paired gaps, nats and points
POINTS_A_NAT = -20.0  # of the suite, by the power model
IDLE_PERCENT = 20  # a GPU below this mean utilisation did not work
TIE = 1e-9  # bars are inclusive: what differs by the rounding of a double meets them
VAL_TOLERANCE = 0.002  # nats between val loss in training and scored again: a tenth of the bar
CONFIRMED, KILLED, INCOMPLETE, INVALID = "CONFIRMED", "KILLED", "INCOMPLETE", "INVALID"
ABSENT = "not recorded"
RUN_KEYS = {"arm", "seed", "params", "config", "curve", "final_val"}
EVAL_KEYS = {"checkpoint_sha256", "tasks", "mean", "items", "val"}
EQUAL = {"code identity equal": "code.code_sha256", "train data": "data.train_sha256", "val data": "data.val_sha256"}  # in all runs
PAIRED = {  # in the arms of a seed; another seed may have run on another node
    "order of data": "order_sha256", "compute dtype": "dtype", "activation checkpoints": "ckpt", "parallel mode": "parallel", "attention kernel": "attention",
    "compiled": "config.compile", "torch": "versions.torch",
}  # fmt: skip
EFFECTS = {
    ("L", "V"): "the recipe: loop and eps", ("L", "VE"): "the loop, at L's eps", ("VE", "V"): "the eps, without the loop", ("L1", "V"): "the loop, at eps 1",
    ("L", "L1"): "the eps, in the loop", ("L3", "V"): "three loops", ("L3", "L"): "three loops against two", ("L05", "V"): "the loop with eps 0.5", ("L05", "L"): "eps 0.5 against L's",
}  # fmt: skip

# ---- reading ----------------------------------------------------------------------------------------------------------


def get(obj, path: str, default=ABSENT):
    """A value by its dotted path in nested dicts; the default where a key is missing or null."""
    for key in path.split("."):
        obj = obj.get(key) if isinstance(obj, dict) else None
    return default if obj is None else obj


def read_record(path: Path, keys: set[str] = RUN_KEYS) -> dict:
    """A results file in the published schema at least, or another record that has these keys."""
    obj = guard.read_json(path)
    if not isinstance(obj, dict) or not keys <= obj.keys():
        raise Refusal(f"{path}: not such a record (it must have {', '.join(sorted(keys))})")
    return obj


def read_files(folder: str, arms, seeds) -> dict:
    """Whatever runs and evals there are: {"runs": {(arm, seed): ...}, "evals": {(arm, seed, kind): ...}}."""
    results, evals = guard.HERE / "results" / folder, guard.HERE / "evals" / folder
    names = [(arm, seed) for arm in arms for seed in seeds]
    runs = {key: read_record(p) for key in names if (p := results / "{}_s{}.json".format(*key)).exists()}
    found = {
        (*key, kind): read_record(p, EVAL_KEYS) for key in names for kind in ("best", "final") if (p := evals / "{}_s{}_{}.json".format(*key, kind)).exists()
    }
    return {"runs": runs, "evals": found}


def load_rung(rung: str, folder: str) -> dict:
    """The bars file, the runs and evals of its arms and seeds, the LR probe, and the study of the noise between seeds where the rung has one."""
    path, results = guard.HERE / "config" / f"bars_{rung}.json", guard.HERE / "results" / folder
    bars = guard.read_json(path)
    if "compare" not in bars:
        raise Refusal(f"rung {rung} compares nothing: no verdict ({path.name})")
    probe = guard.read_json(p) if (p := results / "lr_probe.json").exists() else None
    probes = {r["config"]["lr"]: r["final_val"] for r in map(read_record, sorted(results.glob("V_s0_lr*.json")))} if probe else {}
    data = {"bars": bars, "bars_sha256": guard.sha256_file(path), "folder": folder, "probe": probe, "probes": probes, "study": None}
    if study := bars.get("study"):
        files = read_files(study["folder"], study["arms"], study["seeds"])
        data["study"] = {**data, "bars": bars | {"seeds": study["seeds"]}, "folder": study["folder"], **files} if files["runs"] else None
    return data | read_files(folder, bars["arms"], bars["seeds"])


def is_done(run: dict | None) -> bool:
    return get(run, "status") == "done"


def missing(data: dict) -> list[str]:
    """The commands that would supply what the verdict lacks."""
    bars, folder = data["bars"], data["folder"]
    extra = "" if folder == bars["rung"] else f" --folder={folder}"
    out = []
    if "lr_grid" in bars and not data["probe"]:
        out.append(f"bash run.sh probe {bars['rung']}")
    lr = f" --lr={data['probe']['lr']:g}" if data["probe"] else ""
    world = max((get(r, "world_size", 1) for r in data["runs"].values()), default=1)
    launch = f"torchrun --standalone --nproc_per_node={world}" if world > 1 else "python"
    for seed in bars["seeds"]:
        for arm in bars["compare"]:
            if not is_done(data["runs"].get((arm, seed))):
                out.append(f"{launch} train.py config/{arm}_{bars['rung']}.py --seed={seed}{lr} --resume=auto{extra}")
            wanted = [k for k in ("best", "final") if (arm, seed, k) not in data["evals"]] if bars["tasks"] else []
            if wanted:
                out.append("python eval.py " + " ".join(f"out/{folder}/{arm}_s{seed}/{k}.pt" for k in wanted))
    return out


# ---- audit ------------------------------------------------------------------------------------------------------------


def rule(out: list, name: str, values: dict) -> None:
    """All values of a dict {where: value} must be equal and recorded; appends (name, pass | fail | n/a, what was seen)."""
    seen: dict[str, str] = {}
    for where, v in values.items():
        text = f"{v:.9g}" if isinstance(v, float) else str(v)
        seen[text] = f"{seen[text]}, {where}" if text in seen else where
    if not seen:
        out.append((name, "n/a", "nothing to compare"))
    elif len(seen) == 1 and ABSENT not in seen:
        out.append((name, "pass", next(iter(seen))[:64]))
    else:
        out.append((name, "fail", " | ".join(f"{where}: {v[:64]}" for v, where in seen.items())))


def flat(obj: dict, path: str = "") -> dict:
    """Nested dicts as {dotted path: value}."""
    return {k: v for key, x in obj.items() for k, v in (flat(x, f"{path}{key}.") if isinstance(x, dict) else {path + key: x}).items()}


def bars_changes(data: dict, runs: dict) -> str:
    """What changed in the bars file since a run's start: by key from git where its commit holds that very file, else what the run's config shows."""
    file = f"config/bars_{data['bars']['rung']}.json"
    now = flat(guard.read_json(guard.HERE / file))
    name, run = next((n, r) for n, r in runs.items() if get(r, "bars_sha256") != data["bars_sha256"])
    commit = get(run, "code.git_commit", "")
    text = guard.git("show", f"{commit}:{file}") if re.fullmatch(r"[0-9a-f]{7,64}", commit) else None
    if text and hashlib.sha256(text.encode()).hexdigest() == get(run, "bars_sha256"):
        was = flat(json.loads(text))
    else:
        own = {k: v for k, v in now.items() if k.startswith(("config.", f"arms.{run['arm']}."))}
        was = now | {k: run["config"][short] for k in own if (short := k.rsplit(".", 1)[1]) in run["config"]}
    changed = [f"{k} {was.get(k, 'absent')} -> {now.get(k, 'absent')}" for k in sorted(was | now) if was.get(k) != now.get(k)]
    return f"since {name}: {'; '.join(changed) or 'what changed cannot be told here, without the commit that holds the file of then'}"


def audit(data: dict, arms: list[str]) -> list[tuple[str, str, str]]:
    """Every rule that can make the comparison of some arms unfair, or the record something else than registered, over their runs that are done."""
    bars, out = data["bars"], []
    runs = {f"{arm}_s{seed}": r for (arm, seed), r in data["runs"].items() if arm in arms and is_done(r)}
    every = lambda path: {n: get(r, path) for n, r in runs.items()}
    rule(out, "bars file as at each run's start", {"now": data["bars_sha256"], **every("bars_sha256")})
    if out[-1][1] == "fail":
        out[-1] = (*out[-1][:2], f"{out[-1][2]}; {bars_changes(data, runs)}")
    for name, path in EQUAL.items():
        rule(out, name, every(path))
    for key, said in bars["config"].items():
        rule(out, f"config {key}", ({} if key == "lr" and "lr_grid" in bars else {"bars": said}) | every(f"config.{key}"))
    audit_probe(out, data, every("config.lr"))
    for arm in arms:
        mine = {n: r for n, r in runs.items() if r["arm"] == arm}
        for key, said in bars["arms"][arm].items():
            rule(out, f"{arm} {key}", {"bars": said, **{n: get(r, f"config.{key}") for n, r in mine.items()}})
        rule(out, f"{arm} parameters", {"bars": bars["arms"][arm]["expect_params"], **{n: r["params"] for n, r in mine.items()}})
    for seed in bars["seeds"]:
        for name, path in PAIRED.items():
            rule(out, f"seed {seed}: {name}", {n: get(r, path) for n, r in runs.items() if r["seed"] == seed})
    audit_length(out, bars, runs)
    if flops := [get(r, "flops_per_token", math.nan) for r in runs.values()]:
        out.append(
            (
                "FLOPs a token within 1%",
                "pass" if all(map(math.isfinite, flops)) and max(flops) <= 1.01 * min(flops) else "fail",
                f"{min(flops):.4g} to {max(flops):.4g}",
            )
        )
    for name, r in runs.items():
        audit_run(out, bars, name, r)
    audit_evals(out, data, arms, runs)
    return out


def audit_probe(out: list, data: dict, used: dict) -> None:
    """One LR for all runs, the one with the lowest loss of the probe, by the probes' own files where they are here."""
    if not (probe := data["probe"]):
        return rule(out, "lr as the probe found it", {})
    losses = {float(lr): loss for lr, loss in get(probe, "final_val", {}).items() if loss is not None}
    rule(out, "lr as the probe found it", {"probe": probe["lr"], **used})
    rule(out, "the probe's lr has its lowest loss", {"chosen": probe["lr"], "lowest": min(losses, key=losses.get) if losses else ABSENT})
    untried = sorted(set(get(data["bars"], "lr_grid", [])) - {float(lr) for lr in get(probe, "final_val", {})})
    rule(out, "the probe covers its grid", {"wanted": "all", "probe": f"not {untried}" if untried else "all"})
    runs = data["probes"]  # none of them here: the probe was made on another node
    rule(out, "the probe's losses are its runs'", {"probe": list(losses.values()), "runs": [runs.get(lr, ABSENT) for lr in losses]} if runs else {})


def audit_length(out: list, bars: dict, runs: dict) -> None:
    """Evals at the same steps and training of the same length, in all runs and as registered."""
    c = bars["config"]
    steps_of = {n: [row["step"] for row in r["curve"]] for n, r in runs.items()}
    tokens = {n: get(r["curve"][-1] if r["curve"] else {}, "tokens") for n, r in runs.items()}
    if {"unique_tokens", "window", "epochs", "batch", "length", "eval_every"} <= c.keys():
        steps = round(c["length"] * c["epochs"] * ((c["unique_tokens"] - 1) // c["window"]) / c["batch"])
        steps_of["bars"], tokens["bars"] = sorted({*range(0, steps, c["eval_every"]), steps}), steps * c["batch"] * c["window"]
    rule(out, "eval steps", steps_of)
    rule(out, "tokens trained", tokens)


def audit_run(out: list, bars: dict, name: str, r: dict) -> None:
    """The rules that hold for a run by itself: it is what its name says, whole, unforced, and every rank did its part."""
    tag = get(r, "config.tag", "")
    names = {"run": get(r, "name"), "fields": f"{r['arm']}_s{r['seed']}", "config": f"{get(r, 'config.arm')}_s{get(r, 'config.seed')}{tag and '_' + tag}"}
    rule(out, f"{name}: untagged, and the run it is named", {"file": f"{name} of {bars['rung']}"} | {k: f"{v} of {get(r, 'rung')}" for k, v in names.items()})
    rule(out, f"{name}: not continued past its schedule", {"wanted": 0.0, "decay_epochs": float(get(r, "config.decay_epochs", 0.0))})
    events = get(r, "events", [])
    events = events[max((i for i, e in enumerate(events) if e["event"].startswith("started")), default=0) :]  # of this run, not of one before it
    forced = [e["event"] for e in events if e["event"].startswith("forced")]
    rule(out, f"{name}: no change forced on a resume", {"wanted": "none", "events": "; ".join(forced) or "none"})
    last, low = (r["curve"][-1], best_row(r)) if r["curve"] else ({}, {})
    steps = {"steps": get(r, "steps"), "done": get(r, "step"), "last row": get(last, "step"), "final.pt": get(r, "final.step")}
    rule(out, f"{name}: all steps done", steps)
    rule(out, f"{name}: final loss", {"last row": get(last, "val_loss"), "final_val": r["final_val"], "final.pt": get(r, "final.val_loss")})
    best = {"curve": f"{get(low, 'val_loss')} at {get(low, 'step')}", "best.pt": f"{get(r, 'best.val_loss')} at {get(r, 'best.step')}"}
    rule(out, f"{name}: best.pt is the lowest row", best)
    world = get(r, "world_size", 0)
    windows = get(r, "micro_batch", 0) * get(r, "accum", 0) * world
    rule(out, f"{name}: micro-batch x accumulation x ranks", {"bars": bars["config"].get("batch", windows), "run": windows})
    audit_ranks(out, name, r, world, max((e["step"] for e in events if e["event"].startswith("resumed")), default=0))


def audit_ranks(out: list, name: str, r: dict, world: int, since: int) -> None:
    """Each rank a device of its own, at work, with its share; the rows before the last resume may be of another number of ranks. A CPU claims nothing."""
    devices = get(r, "devices", [])
    ids = [get(d, "uuid", "") for d in devices]
    if not any(ids) and world == 1:
        for what in ("each rank's share of the parameters", "a device a rank", "every rank reports", "no rank idle"):
            out.append((f"{name}: {what}", "n/a", "one process on a CPU, nothing is claimed"))
        return
    rows = [get(row, "ranks", []) for row in r["curve"] if row["step"] > since]
    out.append((f"{name}: each rank's share of the parameters", *share(r, devices, world)))
    rule(out, f"{name}: a device a rank", {"ranks": world, "devices": len(devices), "distinct": len({i for i in ids if i})} if any(ids) else {})
    rule(out, f"{name}: every rank reports", {"ranks": world, "fewest in a row": min(map(len, rows), default=world if since else 0)})
    told = [[ranks[i]["gpu_percent"] for ranks in rows if len(ranks) > i and "gpu_percent" in ranks[i]] for i in range(world)]
    means, told = [sum(t) / len(t) for t in told if t], [len(t) for t in told]
    seen = (
        f"mean utilisation {min(means):.0f} to {max(means):.0f}%, at least {IDLE_PERCENT}% wanted; {min(told)} to {max(told)} rows of {len(rows)}"
        if means
        else "no utilisation recorded"
    )
    fine = means and min(told) == max(told) and min(means) >= IDLE_PERCENT
    out.append((f"{name}: no rank idle", "n/a" if not means else "pass" if fine else "fail", seen))


def share(r: dict, devices: list[dict], world: int) -> tuple[str, str]:
    """Whether each rank held what its mode says: everything, or under FSDP one part of `shards`."""
    held, shards = [get(d, "params_held", 0) for d in devices] or [0], get(r, "config.shard_ranks", 0) or world or 1
    split = get(r, "parallel") == "fsdp"
    even = abs(sum(held) * shards / max(world, 1) / r["params"] - 1) < 0.01 and min(held) > 0.9 * max(held) if split else set(held) == {r["params"]}
    return "pass" if even else "fail", f"{min(held):,} to {max(held):,} of {r['params']:,}"


def audit_evals(out: list, data: dict, arms: list[str], runs: dict) -> None:
    evals = {f"{arm}_s{seed}_{kind}": e for (arm, seed, kind), e in data["evals"].items() if f"{arm}_s{seed}" in runs}
    every = lambda path: {n: get(e, path) for n, e in evals.items()}
    for name, e in evals.items():
        (run, kind), tasks = name.rsplit("_", 1), data["bars"]["tasks"]
        rule(out, f"{name}: of the run it is named", {"file": name, "eval": f"{get(e, 'name')}_{get(e, 'checkpoint')}"})
        rule(out, f"{name}: the registered tasks", {"bars": sorted(tasks.items()), "scored": sorted((t, get(x, "metric")) for t, x in e["tasks"].items())})
        items = {t: get(e, f"items.{t}", "") for t in tasks}
        whole = all(text and len(text) == get(e, f"tasks.{t}.n") for t, text in items.items())
        mean = 100 * sum(text.count("1") / len(text) for text in items.values()) / len(items) if whole else ABSENT
        rule(out, f"{name}: the mean is that of its items", {"items": mean, "mean": float(e["mean"])})
        rule(out, f"{name}: loops as trained", {"bars": get(data["bars"], f"arms.{name.split('_')[0]}.n_loop"), "eval": get(e, "n_loop")})
        rule(out, f"{name}: the very checkpoint", {"trained": get(runs[run], f"{kind}.sha256"), "scored": e["checkpoint_sha256"]})
        was, again = get(runs[run], f"{kind}.val_loss", math.nan), get(e, "val.loss", math.nan)
        near = "pass" if abs(was - again) <= VAL_TOLERANCE else "fail"
        out.append((f"{name}: val loss scored again", near, f"{was:.5f} in training, {again:.5f} here, {VAL_TOLERANCE} allowed"))
        added = float(np.mean(get(e, "val.loss_sums", [math.nan]))) / get(e, "val.tokens_per_window", 1)
        out.append((f"{name}: val windows add up", "pass" if abs(added - again) < 1e-5 else "fail", f"{added:.6f} by the windows, {again:.6f} said"))
    rule(out, "evals: full sets", {"wanted": "no limit", **{n: e.get("limit", ABSENT) or "no limit" for n, e in evals.items()}} if evals else {})
    named = {"code": "code_sha256", "lm-eval version": "lm_eval", "the same items": "items_sha256"}
    for name, path in named.items():
        rule(out, f"evals: {name}", every(path))
    for seed in data["bars"]["seeds"]:
        mine = {n: e for n, e in evals.items() if get(e, "seed") == seed}
        for key in sorted({k for e in mine.values() for k in get(e, "batch_policy", {})}):
            rule(out, f"evals: seed {seed}: batch policy, {key}", {n: get(e, f"batch_policy.{key}") for n, e in mine.items()})
        rule(out, f"evals: seed {seed}: torch", {n: get(e, "versions.torch") for n, e in mine.items()})
    rule(out, "evals: task versions", {n: {t: get(x, "version") for t, x in sorted(e["tasks"].items())} for n, e in evals.items()})
    rule(out, "evals: the val set trained against", every("val.sha256") | {n: get(r, "data.val_sha256") for n, r in runs.items()} if evals else {})


# ---- verdict ----------------------------------------------------------------------------------------------------------


def best_row(run: dict) -> dict:
    return min(run["curve"], key=lambda row: row["val_loss"])


def val_of(run: dict, kind: str) -> float:
    return best_row(run)["val_loss"] if kind == "best" else run["final_val"]


def seed_row(data: dict, seed: int) -> dict | None:
    """One seed's numbers at the primary checkpoint, or None where a piece is missing. Gaps are L - V."""
    bars = data["bars"]
    runs = [data["runs"].get((arm, seed)) for arm in bars["compare"]]
    kind, limit = bars["primary_checkpoint"], bars["bars"]
    evals = [data["evals"].get((arm, seed, kind)) for arm in bars["compare"]]
    if not all(map(is_done, runs)) or (bars["tasks"] and not all(evals)):
        return None
    suite = [e["mean"] for e in evals] if bars["tasks"] else [0.0, 0.0]
    row = {"seed": seed, "best": [val_of(r, "best") for r in runs], "final": [val_of(r, "final") for r in runs], "suite": suite}
    row |= {"val_gap": row[kind][0] - row[kind][1], "suite_gap": suite[0] - suite[1]}
    row["passes"] = row["val_gap"] <= limit["val_gap_max"] + TIE and (not bars["tasks"] or row["suite_gap"] >= limit["suite_gap_min"] - TIE)
    return row


def how_killed(rows: list[dict], bars: dict, noise: dict) -> str:
    """In words, by the mean val gap of the seeds at hand against twice the noise of one seed's gap."""
    gaps, reach = [r["val_gap"] for r in rows], 2 * noise["val"]
    gap = sum(gaps) / len(gaps)
    treated, control = bars["compare"]
    if max(gaps) > reach and min(gaps) < -reach:
        return f"the seeds disagree, by more than the {noise['word']} noise: val gaps {', '.join(f'{g:+.4f}' for g in gaps)}"
    if gap > reach:
        return f"{treated} is worse than {control} (mean val gap {gap:+.4f} nats)"
    if gap > -reach:
        within = f"within twice the {noise['word']} noise of {noise['val']:.4f}"
        return f"no difference seen between {treated} and {control} (mean val gap {gap:+.4f} nats, {within})"
    failed = [r["seed"] for r in rows if not r["passes"]]
    val_ok = all(r["val_gap"] <= bars["bars"]["val_gap_max"] for r in rows)
    return f"{treated} is better on val (mean gap {gap:+.4f}), but misses {'the suite bar' if val_ok else 'a bar'} on seed {' and '.join(map(str, failed))}"


def broken(checks: list) -> list[str]:
    return [f"{name}: {seen}" for name, status, seen in checks if status == "fail"]


def decide(data: dict) -> dict:
    """{"word", "why", "rows", "audit", "missing", "noise", "excluded", "data"}: the verdict by the letter of the bars file.

    excluded: control arms that break a rule, {arm: the rule}; they are left out of what stands beside the verdict and do not touch it.
    """
    bars, compare = data["bars"], data["bars"]["compare"]
    checks, gaps, rows = audit(data, compare), missing(data), [seed_row(data, s) for s in bars["seeds"]]
    rows, faults, noise = [r for r in rows if r], broken(checks), measured_noise(data)
    if faults:
        word, why = INVALID, f"{len(faults)} rule{'s' if len(faults) > 1 else ''} broken, first: {faults[0]}"
    elif any(not r["passes"] for r in rows) and not ("lr_grid" in bars and not data["probe"]):
        word, why = KILLED, how_killed(rows, bars, noise)
    elif gaps:
        word, why = INCOMPLETE, f"{len(gaps)} pieces are missing"
    else:
        word, why = CONFIRMED, "both bars met on every seed" if bars["tasks"] else "the bar met on every seed"
    controls = {arm: broken(audit(data, [*compare, arm])) for arm, _ in data["runs"] if arm not in compare}
    excluded = {arm: new[0] for arm, bad in controls.items() if (new := [b for b in bad if b not in faults])}
    return {"word": word, "why": why, "rows": rows, "audit": checks, "missing": gaps, "noise": noise, "excluded": excluded, "data": data}


# ---- statistics -------------------------------------------------------------------------------------------------------


def gaps_of(data: dict, a: str, b: str) -> dict[int, float]:
    """Val gap a - b of every seed whose runs of both arms are done, at the primary checkpoint."""
    runs, kind = data["runs"], data["bars"]["primary_checkpoint"]
    both = [s for s in data["bars"]["seeds"] if is_done(runs.get((a, s))) and is_done(runs.get((b, s)))]
    return {s: val_of(runs[a, s], kind) - val_of(runs[b, s], kind) for s in both}


def measured_noise(data: dict) -> dict:
    """sd between seeds of the paired gaps, {"val" nats, "suite" points, "word", "gaps", "problem"}: by the rung's study where it is whole and fair, else assumed."""
    noise = {"val": NOISE_SD, "suite": SUITE_SD, "word": "assumed", "gaps": {}, "problem": ""}
    if not (study := data["study"]):
        return noise
    arms, seeds, kind = study["bars"]["study"]["arms"], study["bars"]["seeds"], study["bars"]["primary_checkpoint"]
    absent = sum(not is_done(study["runs"].get((a, s))) for a in arms for s in seeds)
    absent += sum((a, s, kind) not in study["evals"] for a in arms for s in seeds) if study["bars"]["tasks"] else 0
    if absent or (bad := broken(audit(study, arms))):
        return noise | {"problem": f"{absent} runs or evals of it are missing (bash run.sh {study['folder']})" if absent else f"it breaks a rule, {bad[0]}"}
    for path in EQUAL.values():
        if len({get(r, path) for r in [*study["runs"].values(), *filter(is_done, data["runs"].values())]}) > 1:
            return noise | {"problem": f"its {path} is not the record's"}
    a, b = study["bars"]["compare"]
    gaps = {"val": list(gaps_of(study, a, b).values())}
    if study["bars"]["tasks"]:
        gaps["suite"] = [study["evals"][a, s, kind]["mean"] - study["evals"][b, s, kind]["mean"] for s in seeds]
    return noise | {k: float(np.std(v, ddof=1)) for k, v in gaps.items()} | {"word": "measured", "gaps": gaps}


def sd_interval(sd: float, n: int) -> tuple[float, float]:
    """95% interval of the standard deviation of a normal sample of n, by chi-square."""
    return tuple(sd * math.sqrt((n - 1) / stats.chi2.ppf(q, n - 1)) for q in (0.975, 0.025))


def block_bootstrap(diff: np.ndarray, block: int = 4, draws: int = 2000) -> np.ndarray:
    """95% interval of the mean of paired window differences, resampling blocks of consecutive windows: neighbours share a document."""
    cuts = np.arange(0, len(diff), block)
    sums, sizes = np.add.reduceat(diff, cuts), np.diff([*cuts, len(diff)])
    pick = np.random.RandomState(0).randint(len(cuts), size=(draws, len(cuts)))
    return np.quantile(sums[pick].sum(1) / sizes[pick].sum(1), [0.025, 0.975])


def item_diff(a: dict, b: dict, task: str) -> np.ndarray:
    """Outcome of a minus that of b, -1, 0 or 1, for each item of a task."""
    x, y = (np.frombuffer(e["items"][task].encode(), np.uint8).astype(int) for e in (a, b))
    return x - y


def item_bootstrap(diffs: list[np.ndarray], draws: int = 2000) -> np.ndarray:
    """95% interval, in points, of the mean over tasks of paired differences; items resampled within each task (three outcomes: a multinomial)."""
    rng, total = np.random.RandomState(0), np.zeros(draws)
    for d in diffs:
        counts = rng.multinomial(len(d), [np.mean(d == -1), np.mean(d == 0), np.mean(d == 1)], size=draws)
        total += (counts[:, 2] - counts[:, 0]) / len(d)
    return np.quantile(100 * total / len(diffs), [0.025, 0.975])


def mcnemar(d: np.ndarray) -> float:
    """Exact two-sided p of McNemar's test: the discordant items against a fair coin."""
    won, lost = int((d == 1).sum()), int((d == -1).sum())
    return stats.binomtest(won, won + lost).pvalue if won + lost else 1.0


def holm(p: list[float]) -> np.ndarray:
    """Holm's adjusted p-values."""
    order, out = np.argsort(p), np.empty(len(p))
    out[order] = np.minimum(1, np.maximum.accumulate(np.sort(p) * np.arange(len(p), 0, -1)))
    return out


def power(gap: float, bars: dict, noise: dict, seeds: int) -> float:
    """P(pass) at a true val gap: suite gap = -20 points a nat x it, independent normal noises, every bar on every seed."""
    p = stats.norm.cdf((bars["bars"]["val_gap_max"] - gap) / max(noise["val"], 1e-12))
    if bars["tasks"]:
        p *= stats.norm.cdf((POINTS_A_NAT * gap - bars["bars"]["suite_gap_min"]) / max(noise["suite"], 1e-12))
    return p**seeds


# ---- output -----------------------------------------------------------------------------------------------------------


def table(head: list, rows: list[list]) -> list[str]:
    """A Markdown table, its columns padded so that it reads well in a terminal too."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    wide = [max(2, *(len(row[i]) for row in cells)) for i in range(len(head))]
    line = lambda row: "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, wide))) + " |"
    return [line(cells[0]), "|" + "|".join(f" {'-' * w} " if i == 0 else f" {'-' * (w - 1)}: " for i, w in enumerate(wide)) + "|", *map(line, cells[1:]), ""]


def between(pair, digits: int = 4) -> str:
    return f"{pair[0]:+.{digits}f} to {pair[1]:+.{digits}f}"


def paired_evals(v: dict, seed: int) -> list[dict] | None:
    """The primary checkpoint's evals of both arms of a seed."""
    bars = v["data"]["bars"]
    found = [v["data"]["evals"].get((arm, seed, bars["primary_checkpoint"])) for arm in bars["compare"]]
    return found if all(found) else None


def primary(v: dict) -> list[str]:
    bars = v["data"]["bars"]
    (treated, control), limit = bars["compare"], bars["bars"]
    head = ["", f"{control} best", f"{treated} best", "gap", f"{control} final", f"{treated} final", "gap"]
    head += [f"{control} suite", f"{treated} suite", "gap"] if bars["tasks"] else []
    rows = []
    for r in v["rows"]:
        row = [f"seed {r['seed']}"] + [x for k in ("best", "final") for x in (f"{r[k][1]:.4f}", f"{r[k][0]:.4f}", f"{r[k][0] - r[k][1]:+.4f}")]
        row += [f"{r['suite'][1]:.2f}", f"{r['suite'][0]:.2f}", f"{r['suite_gap']:+.2f}"] if bars["tasks"] else []
        rows.append([*row, "met" if r["passes"] else "missed"])
    suite = f" AND suite gap >= +{limit['suite_gap_min']} point" if bars["tasks"] else " (no suite at this rung)"
    said = f"Bars: val gap {treated} - {control} <= {limit['val_gap_max']} nats{suite}, at the {bars['primary_checkpoint']}-val checkpoint, on every seed."
    return [*(table([*head, "bars"], rows) if rows else []), said]


def seeds_and_noise(v: dict) -> list[str]:
    noise, out = v["noise"], []
    for key, unit, digits in [("val", "nats", 4), ("suite", "points", 2)][: 2 if v["data"]["bars"]["tasks"] else 1]:
        show = lambda values, d=digits: f"{', '.join(f'{g:+.{d}f}' for g in values)}, mean {np.mean(values):+.{d}f}"
        if v["rows"]:
            out.append(f"{key.capitalize()} gap by seed: {show([r[f'{key}_gap'] for r in v['rows']])} {unit}.")
        line = f"Noise of one seed's {key} gap, {noise['word']}: sd {noise[key]:.{digits}f} {unit}"
        if n := len(gaps := noise["gaps"].get(key, [])):
            low, high = sd_interval(noise[key], n)
            line += f", 95% {low:.{digits}f} to {high:.{digits}f} by chi-square, from {n} seeds: {show(gaps)} +- {noise[key] / math.sqrt(n):.{digits}f}"
        out.append(line + ".")
    out += [f"The study of the noise is not used: {noise['problem']}."] if noise["problem"] else []
    if noise["gaps"]:  # the same seeds trained twice: what differs here is no seed noise
        twice = [abs(val_of(r, "best") - val_of(run, "best")) for key, r in v["data"]["study"]["runs"].items() if is_done(run := v["data"]["runs"].get(key))]
        out += [f"The study trained {len(twice)} of the record's runs again; their best val losses differ by at most {max(twice):.2g} nats."] if twice else []
    return [*out, "Two seeds alone give no interval for training noise; the intervals below hold the runs fixed."]


def intervals(v: dict) -> list[str]:
    out = []
    for r in v["rows"]:
        if not (pair := paired_evals(v, r["seed"])):
            continue
        a, b = (np.array(get(e, "val.loss_sums", [])) / get(e, "val.tokens_per_window", 1) for e in pair)
        if len(a) == len(b) > 0:
            out.append([f"seed {r['seed']}", "val sample (blocks of 4 windows)", f"{np.mean(a - b):+.4f} nats", between(block_bootstrap(a - b))])
        diffs = [item_diff(*pair, t) for t in v["data"]["bars"]["tasks"]]
        out.append([f"seed {r['seed']}", "test items (within each task)", f"{r['suite_gap']:+.2f} points", between(item_bootstrap(diffs), 2)])
    return table(["", "what varies", "gap", "95%"], out) if out else []


def gold_gap(pair: list[dict], task: str) -> str:
    """Mean gap of the gold continuation's nats a byte, with its standard error over items; older evals have none."""
    a, b = (np.array(get(e, f"gold_nll.{task}", [])) for e in pair)
    return f"{np.mean(a - b):+.4f} +- {stats.sem(a - b):.4f}" if len(a) == len(b) > 1 else "n/a"


def by_task(v: dict) -> list[str]:
    tasks, out = list(v["data"]["bars"]["tasks"]), []
    for r in v["rows"]:
        if pair := paired_evals(v, r["seed"]):
            diffs = {t: item_diff(*pair, t) for t in tasks}
            p = [mcnemar(d) for d in diffs.values()]
            for (t, d), one, all_of in zip(diffs.items(), p, holm(p)):
                values = [f"{100 * e['tasks'][t]['value']:.2f}" for e in reversed(pair)]
                discordant = f"{(d == 1).sum()} / {(d == -1).sum()}"
                out.append([f"{t}, seed {r['seed']}", *values, f"{100 * d.mean():+.2f}", discordant, f"{one:.3f}", f"{all_of:.3f}", gold_gap(pair, t)])
    treated, control = v["data"]["bars"]["compare"]
    head = ["", control, treated, "gap", f"{treated} only / {control} only", "McNemar p", "Holm p", "gold nats a byte, gap"]
    return table(head, out) if out else []


def power_table(v: dict) -> list[str]:
    bars, noise = v["data"]["bars"], v["noise"]
    gaps, n = (0.0, -0.02, -0.03, -0.05, -0.08, -0.10), len(bars["seeds"])
    model = f"Model: normal noise between seeds, {noise['word']} sd {noise['val']:.4f} nats"
    if bars["tasks"]:
        model += (
            f" and {noise['suite']:.2f} points, independent; a true suite gap of {POINTS_A_NAT:g} points a nat of true val gap, by which the val bar is worth "
        )
        model += f"{POINTS_A_NAT * bars['bars']['val_gap_max']:+.1f} point and the suite bar {bars['bars']['suite_gap_min'] / POINTS_A_NAT:+.2f} nats"
    return [model + ".", "", *table(["true val gap", *(f"{g:+.2f}" for g in gaps)], [["P(pass)", *(f"{power(g, bars, noise, n):.2f}" for g in gaps)]])]


def forecast(v: dict) -> list[str]:
    said, rows, out = v["data"]["bars"]["forecast"], v["rows"], []
    for key, unit in (("val_gap", "nats"), ("suite_gap", "points")):
        if said[key] is not None:
            sd = said.get(f"{key}_sd")
            line = f"{key.replace('_', ' ')}: forecast {said[key]:+g}{f' +- {sd:g}' if sd else ''} {unit}"
            got = sum(r[key] for r in rows) / len(rows) if rows else None
            out.append(line + (f"; outcome {got:+.4f}{f', {(got - said[key]) / sd:+.1f} sd from it' if sd else ''}." if rows else "; no outcome yet."))
    return [*out, f"Reason given: {said['why']}."]


def comparable_clock(a: dict, b: dict) -> str:
    """Why the seconds of two runs cannot be compared, "" if they can."""
    if any(" -> " in e["event"] or e["event"].startswith("resumed") for r in (a, b) for e in get(r, "events", [])):
        return "a run was resumed: its seconds may be of two machines or modes"
    if not all(get(d, "uuid", "") for r in (a, b) for d in r["devices"]):
        return "no GPU: seconds on a shared CPU are no measure"
    differs = [f"{k} {get(a, k)} and {get(b, k)}" for k in ("ckpt", "micro_batch", "parallel", "world_size") if get(a, k) != get(b, k)]
    names = [sorted({get(d, "name") for d in r["devices"]}) for r in (a, b)]
    return "; ".join(differs + [f"GPU model {names[0]} and {names[1]}"] * (names[0] != names[1]))


def wall_clock_gap(a: dict, b: dict) -> float:
    """Best val of a, less the best that b had within a's training seconds, its curve read there by a straight line."""
    end, sec, val = a["curve"][-1]["sec"], [r["sec"] for r in b["curve"]], [r["val_loss"] for r in b["curve"]]
    return best_row(a)["val_loss"] - min([x for s, x in zip(sec, val) if s <= end] + [float(np.interp(end, sec, val))])


def matched(v: dict) -> list[str]:
    """The gap at equal tokens (primary) along the run, and within equal seconds (secondary)."""
    out, clock, (treated, control) = [], {}, v["data"]["bars"]["compare"]
    for r in v["rows"]:
        a, b = (v["data"]["runs"][arm, r["seed"]] for arm in (treated, control))
        at = [a["curve"][round(q * (len(a["curve"]) - 1))] for q in (0.25, 0.5, 0.75, 1)]
        theirs = {row["step"]: row["val_loss"] for row in b["curve"]}
        out.append([f"seed {r['seed']}", *(f"{row['val_loss'] - theirs[row['step']]:+.4f}" for row in at), f"{r['best'][0] - r['best'][1]:+.4f}"])
        why = comparable_clock(a, b)
        clock.setdefault(f"n/a, {why}" if why else f"{wall_clock_gap(a, b):+.4f} nats", []).append(f"seed {r['seed']}")
    if not out:
        return []
    said = f"Wall-clock-matched, best {treated} less the best {control} within {treated}'s training seconds ({control} un-annealed there: its loss is an upper bound): "
    head = ["tokens-matched gap", *(f"{row['tokens']:.3g} tokens" for row in at), "best to best"]
    return [*table(head, out), said + "; ".join(f"{', '.join(seeds)}: {gap}" for gap, seeds in clock.items()) + "."]


def each_run(v: dict) -> list[str]:
    """Best and final of every run, the overfit between them; from the evals, where the rung has any, bits a byte and the suite mean at both."""
    data, out = v["data"], []
    head = ["", "best val", "at step", "epoch", "final", "final - best"]
    for (arm, seed), run in sorted(data["runs"].items()):
        if is_done(run) and arm not in v["excluded"]:
            low, evals = best_row(run), [data["evals"].get((arm, seed, k)) for k in ("best", "final")]
            row = [f"{arm} seed {seed}", f"{low['val_loss']:.4f}", low["step"], f"{get(low, 'epoch', math.nan):.1f}", f"{run['final_val']:.4f}"]
            row.append(f"{run['final_val'] - low['val_loss']:+.4f}")
            if data["bars"]["tasks"]:
                row += [f"{get(e, path):.{digits}f}" if e else "n/a" for path, digits in (("val.bits_per_byte", 4), ("mean", 2)) for e in evals]
            out.append(row)
    head += ["bits a byte, best", "final", "suite, best", "final"] if data["bars"]["tasks"] else []
    return table(head, out) if out else []


def effects(v: dict) -> list[str]:
    """Differences between arms: L - V = (L - VE) + (VE - V), the loop at either eps, three loops; by the rung's own arms or its study's."""
    data, out = v["data"], [f"{arm} is left out, it breaks a rule: {why}." for arm, why in v["excluded"].items()]
    arms = {arm for (arm, _), run in data["runs"].items() if is_done(run)} - set(v["excluded"])
    if len(arms) < 3 and v["noise"]["word"] == "measured":
        data, arms = data["study"], {arm for arm, _ in data["study"]["runs"]}
        out.append(f"By the runs of the study (results/{data['folder']}), seeds {', '.join(map(str, data['bars']['seeds']))}.")
    whole = {**data, "bars": data["bars"] | {"seeds": [s for s in data["bars"]["seeds"] if all(is_done(data["runs"].get((arm, s))) for arm in arms)]}}
    gaps = {pair: list(gaps_of(whole, *pair).values()) for pair in EFFECTS if set(pair) <= arms}  # the same seeds in every line, so that they add up
    rows = []
    for (a, b), values in gaps.items() if len(arms) > 2 else ():
        if n := len(values):
            reach = stats.t.ppf(0.975, n - 1) * stats.sem(values) if n > 2 else math.nan
            rows.append([f"{a} - {b}", EFFECTS[a, b], n, f"{np.mean(values):+.4f}", between(np.mean(values) + np.array([-reach, reach])) if n > 2 else "n/a"])
    if rows:
        sizes = ", ".join(f"{a} {x['n_layer']} x {x['n_loop']} {x['expect_params']:,}" for a, x in data["bars"]["arms"].items() if a in arms)
        out += ["", *table(["val gap", "what it is", "seeds", "mean", "95% between seeds (t)"], rows), f"Blocks x loops, parameters: {sizes}."]
    loop, limit = np.mean(gaps.get(("L", "VE")) or [math.nan]), data["bars"]["bars"]["val_gap_max"]
    if v["word"] == CONFIRMED and math.isnan(loop):
        out.append("VE has not been run on these seeds: the confirmed gap is attributed to neither the loop nor the eps.")
    if v["word"] == CONFIRMED and loop > limit:
        out.append(f"L - VE = {loop:+.4f} > {limit}: the confirmed gap is not attributable to the loop.")
    return out


def report(v: dict) -> list[tuple[str, list[str]]]:
    """(heading, lines) of what stands beside the verdict; a section without anything to say is left out. None of it decides."""
    parts = {
        "Seeds and their noise": seeds_and_noise, "Intervals, the runs held fixed": intervals, "By task": by_task, "Equal tokens, equal seconds": matched,
        "Each run: best and final": each_run, "Sharing, eps and loops": effects, "Forecast against outcome": forecast, "Power": power_table,
    }  # fmt: skip
    registered = "Registered as secondary: " + "; ".join(v["data"]["bars"]["secondary"]) + ". Whatever else is here is exploratory too."
    return [("", [registered])] + [(name, lines) for name, part in parts.items() if (lines := part(v))]


def print_audit(checks: list, verbose: bool) -> None:
    count = {s: sum(status == s for _, status, _ in checks) for s in ("pass", "fail", "n/a")}
    print(f"audit: {count['pass']} pass, {count['fail']} fail, {count['n/a']} n/a" + ("" if verbose else "  (--audit lists every rule)"))
    for name, status, seen in checks:
        if verbose or status == "fail":
            print(f"  {status:4}  {name:44}  {seen}")
    print()


def conclusion(v: dict) -> list[str]:
    """The word, its reason, the rung's role and gate, what is missing."""
    bars, folder = v["data"]["bars"], v["data"]["folder"]
    out = [f"{v['word']}: {v['why']}", f"(rung {bars['rung']}, role {bars['role']}: {bars['role_text']})"]
    if gate := bars.get("gate"):
        bypass = guard.HERE / "results" / folder / "gate_bypassed.json"
        said = f"; it was bypassed (--anyway) when it was {guard.read_json(bypass)['word']}" if bypass.exists() else ""
        out.append(f"gate {gate}: {decide(load_rung(gate, gate))['word']}{said}")
    if get(v["data"]["probe"], "edge", False):
        out.append(f"the probe's lr {v['data']['probe']['lr']:g} is an edge of its grid")
    return out


def print_verdict(v: dict, verbose: bool = False) -> None:
    """Audit first; then the primary result by the letter; then, apart, the rest. An INVALID record gets no number."""
    print(f"{v['data']['folder']}: {v['data']['bars']['claim']}")
    print_audit(v["audit"], verbose)
    if v["word"] != INVALID:
        print("\n".join(primary(v)) + "\n")
    print("\n".join(conclusion(v)))
    if v["word"] == INCOMPLETE:
        print("missing; these commands supply it:\n  " + "\n  ".join(v["missing"]))
    if v["word"] != INVALID:
        print(f"\n{'=' * 30} Beside the verdict (exploratory) {'=' * 30}")
        for name, lines in report(v):
            print("\n" + "\n".join([f"-- {name} --"] * bool(name) + lines).rstrip())


def print_replica(mine: dict) -> None:
    """A replication beside the record: the same table from other hands."""
    rung, runs = mine["data"]["bars"]["rung"], mine["data"]["runs"]
    record = decide(load_rung(rung, rung))
    if not runs or not record["data"]["runs"]:
        return print("\nno record of this rung to compare with" if runs else "")
    print(f"\nthe record (results/{rung}): {record['word']}: {record['why']}")
    theirs = {r["seed"]: r for r in record["rows"] if record["word"] != INVALID}
    both = [(r, theirs[r["seed"]]) for r in mine["rows"] if r["seed"] in theirs]
    rows = [[f"seed {r['seed']}", *(f"{x:+.4f}" for k in ("val_gap", "suite_gap") for x in (r[k], t[k]))] for r, t in both]
    print("\n".join(table(["", "val gap", "record", "suite gap", "record"], rows) if rows else []))
    for what, path in {"data": "data.train_sha256", "code": "code.code_sha256", "torch": "versions.torch"}.items():
        a, b = ({get(r, path)[:12] for r in part.values()} for part in (runs, record["data"]["runs"]))
        print(f"{what:6} {'the same as the record' if a == b else f'differs: {sorted(a)} against {sorted(b)}'}")


# ---- figures ----------------------------------------------------------------------------------------------------------


def save_figure(fig, path: Path) -> None:
    """Write a PNG, the same bytes for the same figures, and only if it changes."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", bbox_inches="tight", metadata={"Software": None})
    if not path.exists() or path.read_bytes() != buffer.getvalue():
        guard.replace_file(path, lambda f: f.write(buffer.getvalue()))
    print(f"figure: {path.relative_to(guard.HERE) if path.is_relative_to(guard.HERE) else path}")


def style(bars: dict, arm: str, seed: int) -> dict:
    """An arm's colour is the same in every figure; a seed has its line and its mark, open so that marks on one spot are all seen."""
    i = bars["seeds"].index(seed) % len(LINES)
    return {"color": COLOURS.get(arm, "0.3"), "ls": LINES[i], "marker": MARKS[i], "ms": 7 + 2 * i, "mfc": "none", "mew": 1.8}


def epochs_on_top(ax, runs: dict) -> None:
    if unique := next((get(r, "data.unique_tokens", 0) for r in runs.values()), 0):
        ax.secondary_xaxis("top", functions=(lambda t: t / unique, lambda e: e * unique)).set_xlabel("epochs over the unique tokens")


def draw_curves(ax, v: dict) -> bool:
    """Val loss of every run over tokens, minima marked."""
    bars, shown = v["data"]["bars"], {k: r for k, r in v["data"]["runs"].items() if len(r["curve"]) > 1}
    for (arm, seed), run in sorted(shown.items()):
        rows, low, how = [r for r in run["curve"] if r["step"]], best_row(run), style(bars, arm, seed)
        at = [rows.index(low)] if low in rows else []
        ax.plot(*zip(*((r["tokens"], r["val_loss"]) for r in rows)), lw=1.6, markevery=at, label=f"{arm} seed {seed}: best {low['val_loss']:.3f}", **how)
    if shown:
        lows, ends = [best_row(r)["val_loss"] for r in shown.values()], [r["curve"][-1]["val_loss"] for r in shown.values()]
        ax.set_ylim(min(lows) - 0.1, max(max(ends), min(lows) + 0.5) + 0.3)
        epochs_on_top(ax, shown)
        ax.legend(frameon=False, ncols=math.ceil(len(shown) / 6))
    ax.set(xlabel="training tokens", ylabel="val loss, nats a token", title=f"{v['data']['folder']}: val loss, equal FLOPs a token; marks at the minima")
    return bool(shown)


def draw_gap(ax, v: dict) -> bool:
    """Each seed's paired gap over tokens, the bar, and the band in which no difference is seen."""
    (a, b), bars, runs, drawn = v["data"]["bars"]["compare"], v["data"]["bars"], v["data"]["runs"], []
    for seed in bars["seeds"]:
        theirs = {r["step"]: r["val_loss"] for r in get(runs.get((b, seed)), "curve", []) if r["step"]}
        rows = [(r["tokens"], r["val_loss"] - theirs[r["step"]]) for r in get(runs.get((a, seed)), "curve", []) if r["step"] in theirs]
        if rows:
            ax.plot(*zip(*rows), lw=1.6, label=f"seed {seed}", **style(bars, a, seed) | {"ms": 4})
            drawn += [gap for _, gap in rows[len(rows) // 4 :]]
    if drawn:
        sd, limit = v["noise"]["val"], bars["bars"]["val_gap_max"]
        ax.axhspan(-2 * sd, 2 * sd, color="0.85", zorder=0, label=f"no difference seen: within 2 sd of seed noise, {v['noise']['word']}, {sd:.4f}")
        ax.axhline(limit, color="black", lw=1.2, ls=(0, (6, 2)), label=f"bar: {limit}")
        low, high = min([*drawn, -2 * sd, limit]), max([*drawn, 2 * sd])
        ax.set_ylim(low - 0.1 * (high - low), high + 0.45 * (high - low))
        epochs_on_top(ax, runs)
        ax.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)
    ax.set(xlabel="training tokens", ylabel=f"val gap {a} - {b}, nats a token", title=f"{v['data']['folder']}: gap at equal tokens; below 0 {a} is better")
    return bool(drawn)


def draw_tasks(ax, v: dict) -> bool:
    """Paired difference of each task and of the suite mean, with 95% intervals over test items."""
    (a, b), bars, names = v["data"]["bars"]["compare"], v["data"]["bars"], [*v["data"]["bars"]["tasks"], "suite mean"]
    found = {seed: pair for seed in bars["seeds"] if (pair := paired_evals(v, seed))} if bars["tasks"] else {}
    for k, (seed, pair) in enumerate(found.items()):
        diffs = [item_diff(*pair, t) for t in bars["tasks"]]
        groups = [*([d] for d in diffs), diffs]
        mean, at = [100 * np.mean([d.mean() for d in g]) for g in groups], np.arange(len(names)) + 0.24 * (k - (len(found) - 1) / 2)
        how = style(bars, a, seed)
        _, _, lines = ax.errorbar(
            mean, at, xerr=np.abs(np.array([item_bootstrap(g) for g in groups]).T - mean), capsize=3, label=f"seed {seed}", **how | {"ls": "none"}
        )
        lines[0].set_linestyle(how["ls"])
    limit, end = bars["bars"]["suite_gap_min"], len(names) - 1
    ax.axvline(0, color="0.5", lw=1)
    if found:
        ax.plot([limit] * 2, [end - 0.45, end + 0.45], color="black", lw=2, label=f"bar of the mean: {limit:+g}")
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(end + 0.6, -0.6), xlabel=f"{a} - {b}, points; 95% over test items, the runs held fixed")
    ax.set_title(f"{v['data']['folder']}: zero-shot tasks at the {bars['primary_checkpoint']}-val checkpoint")
    return bool(found)


def draw_rms(ax, v: dict) -> bool:
    """rms of the residual stream by depth in block applications, so that looped and vanilla arms share the axis: at init (dotted) and at the end."""
    bars, drawn = v["data"]["bars"], set()
    for (arm, seed), run in sorted(v["data"]["runs"].items()):
        rows, shape = [r for r in run["curve"] if r.get("rms")], bars["arms"][arm]
        if len(rows) > 1 and arm not in drawn:
            x = np.linspace(0, shape["n_layer"] * shape["n_loop"], len(rows[0]["rms"]))
            for row, ls, lw in ((rows[0], ":", 1.2), (rows[-1], "-", 2)):
                ax.plot(x, row["rms"], ls=ls, lw=lw, color=COLOURS.get(arm, "0.3"), marker="o", ms=4, label=f"{arm} seed {seed}, step {row['step']}")
            drawn.add(arm)
    ax.set(yscale="log", xlabel="block applications", ylabel="rms of the residual stream", title=f"{v['data']['folder']}: residual stream by depth")
    if drawn:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return bool(drawn)


def draw(v: dict) -> list[str]:
    """The rung's figures as PNGs under results/<folder>/; returns the names of those that have something to show."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for name, figure in {"curves": draw_curves, "gap": draw_gap, "tasks": draw_tasks, "rms": draw_rms}.items():
        fig, ax = plt.subplots(figsize=(8, 4.5), dpi=150)
        ax.grid(alpha=0.3)
        if figure(ax, v):
            save_figure(fig, guard.HERE / "results" / v["data"]["folder"] / f"{name}.png")
            made.append(name)
        plt.close(fig)
    return made


# ---- paper ------------------------------------------------------------------------------------------------------------

CAPTIONS = {"curves": "Val loss of every run", "gap": "Gap over tokens", "tasks": "Differences by task", "rms": "Residual stream by depth"}


def paper_block(v: dict, figures: list[str]) -> str:
    """A rung's part of PAPER.md in Markdown, from the same lines that are printed."""
    bars, folder = v["data"]["bars"], v["data"]["folder"]
    count = {s: sum(status == s for _, status, _ in v["audit"]) for s in ("pass", "fail", "n/a")}
    run = bool(v["data"]["runs"])
    out = [f"**{v['word'] if run else 'Not yet run'}.** Role: {bars['role']} ({bars['role_text']}). Claim: {bars['claim']}.", ""]
    if run:
        out += [f"Audit: {count['pass']} rules pass, {count['fail']} fail, {count['n/a']} do not apply.", "", *(f"- {line}" for line in conclusion(v)), ""]
    if v["word"] != INVALID:
        out += [*primary(v), "", *(f"![{CAPTIONS[f]}](results/{folder}/{f}.png)" for f in figures), "", "#### Beside the verdict (exploratory)", ""]
        for name, lines in report(v):
            out += [f"*{name}.*", ""] * bool(name) + [*lines, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def write_paper(v: dict, figures: list[str]) -> None:
    path, rung = guard.HERE / "PAPER.md", v["data"]["bars"]["rung"]
    text = path.read_text() if path.exists() else ""
    begin, end = f"<!-- begin: {rung} -->\n", f"<!-- end: {rung} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise Refusal(f"{path.name}: no pair of lines {begin.strip()} and {end} to write between")
    new = text[: text.index(begin)] + begin + paper_block(v, figures) + "\n" + text[text.index(end) :]
    if new != text:
        guard.replace_file(path, lambda f: f.write(new.encode()))
    print(f"{path.name}: rung {rung} {'written' if new != text else 'unchanged'}")


# ---- status -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    m = int(seconds) // 60
    return f"{m // 1440}d{m // 60 % 24:02}h" if m >= 1440 else f"{m // 60}h{m % 60:02}m" if m >= 60 else f"{m}m{int(seconds) % 60:02}s"


def eta(run: dict) -> str:
    """Time left of a running run by the record's own rates, the evals to come counted."""
    step, sec = get(run, "step", 0), get(run, "sec", {})
    if not step or get(run, "status") != "running":
        return ""
    left, every = run["steps"] - step, get(run, "config.eval_every", run["steps"])
    return duration(left * sec["train"] / step + (left // every + 1) * sec["eval"] / max(1, len(run["curve"])))


def status_row(path: Path) -> list[str]:
    """One run as its results file has it: status, step, epoch, last and best val, ETA, last event, age of the file."""
    if not path.exists():
        return [path.stem, "not started", *[""] * 7]
    try:
        run = read_record(path)
    except Refusal as e:
        return [path.stem, "unreadable", *[""] * 5, str(e).split(": ", 1)[1][:60], ""]
    age, rows, step, steps = time.time() - path.stat().st_mtime, run["curve"], get(run, "step", 0), get(run, "steps", 0)
    row_sec = (get(run, "sec.train", 0) + get(run, "sec.eval", 0)) / max(1, len(rows))
    silent = " (silent: dead?)" if get(run, "status") == "running" and age > 3 * row_sec + 1200 else ""
    vals = [f"{get(rows[-1], 'epoch', math.nan):.2f}", f"{rows[-1]['val_loss']:.4f}", "{val_loss:.4f} at {step}".format(**best_row(run))] if rows else [""] * 3
    last = get(run, "events", [{"event": ""}])[-1]["event"][:60]
    return [path.stem, get(run, "status") + silent, f"{step}/{steps} {step / max(1, steps):.0%}", *vals, eta(run), last, duration(age)]


def print_status(rungs: list[str], folder: str | None) -> None:
    """Of each rung its registered runs, started or not, then whatever else lies there."""
    for rung in rungs:
        bars, results = guard.read_json(guard.HERE / "config" / f"bars_{rung}.json"), guard.HERE / "results" / (folder or rung)
        paths = {arm: [results / f"{arm}_s{seed}.json" for seed in bars["seeds"]] for arm in bars["arms"]}
        paths = [p for arm, files in paths.items() for p in files if arm in bars.get("compare", bars["arms"]) or p.exists()]
        head = ["run", "status", "step", "epoch", "val", "best", "ETA", "last event", "written, ago"]
        print(f"{results.name} (role {bars['role']})\n" + "\n".join(table(head, [status_row(p) for p in paths])))
        if others := sorted(set(results.glob("*_s*.json")) - set(paths)):
            print("tagged or other runs, none of them the verdict's\n" + "\n".join(table(head, [status_row(p) for p in others])))


# ---- published curves -------------------------------------------------------------------------------------------------


def published(folder: Path) -> None:
    """Best, final and gap to the vanilla arm for a folder of <phase>_<arm>_s<seed>.json (A: vanilla; C, E3: looped; 768: width)."""
    runs = {p.stem: read_record(p) for p in sorted(folder.glob("*.json"))}
    if not runs:
        raise Refusal(f"{folder}: no results in it")
    print(f"{'run':22}{'params':>13}{'best val':>10}{'at step':>9}{'final':>9}{'final-best':>12}{'gap to vanilla':>16}")
    for name, run in runs.items():
        phase, arm = name.split("_")[0], run["arm"]
        vanilla = runs.get(f"{phase}_{'A768' if arm.endswith('768') else 'A'}_s{run['seed']}")
        low = best_row(run)
        gap = "" if vanilla in (run, None) else f"{low['val_loss'] - best_row(vanilla)['val_loss']:+16.4f}"
        print(f"{name:22}{run['params']:13,}{low['val_loss']:10.4f}{low['step']:9}{run['final_val']:9.4f}{run['final_val'] - low['val_loss']:+12.4f}{gap}")


# ---- LR probe ---------------------------------------------------------------------------------------------------------


def pick_lr(rung: str, folder: str) -> None:
    """The LR with the lowest final val loss among the rung's finished probes of V; says so when it is an edge of the grid."""
    paths = sorted((guard.HERE / "results" / folder).glob("V_s0_lr*.json"))
    runs = [r for r in map(read_record, paths) if r["status"] == "done" or "loss nan" in (r["traceback"] or "") or "loss inf" in (r["traceback"] or "")]
    if len({r["config"]["lr"] for r in runs}) < 3:
        raise Refusal(f"{len(runs)} finished probes in results/{folder}: at least 3 are needed (bash run.sh probe {rung})")
    for what in ("length", "warmup", "batch", "unique_tokens"):
        if len({r["config"][what] for r in runs}) > 1:
            raise Refusal(f"the probes in results/{folder} differ in {what}: not comparable; remove the odd one")
    found = {r["config"]["lr"]: r["final_val"] for r in runs}  # None: it diverged
    best = min((lr for lr in found if found[lr] is not None), key=found.get)
    edge = best in (min(found), max(found))
    guard.write_json(
        guard.HERE / "results" / folder / "lr_probe.json", {"rung": rung, "lr": best, "edge": edge, "final_val": found, "length": runs[0]["config"]["length"]}
    )
    print("  ".join(f"lr {lr:g}: {'diverged' if loss is None else f'{loss:.4f}'}{' <' if lr == best else ''}" for lr, loss in sorted(found.items())))
    if edge:
        print(f"lr {best:g} is an edge of the grid: extend it (bash run.sh probe {rung} --grid=...) before the runs, or say so in the paper")


# ---- command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rung", help="nano, flip, 400m, 1b; or status; or a folder of published curves")
    p.add_argument("of", nargs="?", help="after status: the rung, else all")
    p.add_argument("--folder", help="folder under results/ and evals/; default: the rung")
    p.add_argument("--audit", action="store_true", help="list every rule")
    p.add_argument("--paper", action="store_true", help="write the rung's part of PAPER.md")
    p.add_argument("--probe", action="store_true", help="pick the LR from the finished probes")
    p.add_argument("--word", action="store_true", help="print the verdict's one word only")
    args = p.parse_args()
    rungs = [path.stem.removeprefix("bars_") for path in sorted((guard.HERE / "config").glob("bars_*.json"))]
    rung = args.of if args.rung == "status" else args.rung
    if rung and rung not in rungs:
        if Path(rung).is_dir():
            return published(Path(rung))
        raise Refusal(f'"{rung}" is neither a rung ({", ".join(rungs)}) nor a folder of published curves')
    if args.rung == "status":
        return print_status([rung] if rung else rungs, args.folder)
    folder = args.folder or rung
    if args.probe:
        return pick_lr(rung, folder)
    if args.paper and folder != rung:
        raise Refusal("--paper holds the record only, not --folder")
    v = decide(load_rung(rung, folder))
    if args.word:
        return print(v["word"])
    figures = draw(v) if v["word"] != INVALID else []
    if args.paper:
        return write_paper(v, figures)
    print_verdict(v, args.audit)
    if folder != rung:
        print_replica(v)
    sys.exit(0 if v["word"] in (CONFIRMED, KILLED) else 1)


if __name__ == "__main__":
    main()
