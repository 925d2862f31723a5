"""results/ and evals/ of a rung -> audit, table, verdict, figure. Reads those files and config/bars_<rung>.json only; trains nothing.

    python verdict.py nano                              # the record
    python verdict.py nano --folder=replica_nano        # one's own replication, the record beside it
    python verdict.py path/to/published/curves          # a folder of published curves: best, final, gaps
    python verdict.py 1b --probe                        # picks the LR from the rung's finished probes, writes lr_probe.json
    python verdict.py 400m --word                       # the one word, for scripts

One of CONFIRMED, KILLED (by how), INCOMPLETE (with the commands that supply what is missing), INVALID (the rule broken). Exit
code 0 for the first two, 1 for the others.
"""

import argparse
import io
import sys
from pathlib import Path

import guard
from guard import Refusal

COLOURS = {"V": "#0072B2", "L": "#D55E00", "VE": "#009E73", "L1": "#CC79A7", "L3": "#E69F00", "L05": "#56B4E9"}  # Okabe and Ito, colour-blind safe
NOISE_SD = 0.003  # assumed sd of the paired val gap between seeds, nats
CONFIRMED, KILLED, INCOMPLETE, INVALID = "CONFIRMED", "KILLED", "INCOMPLETE", "INVALID"

# ---- reading ----------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> dict:
    """A results file in the published schema, at least."""
    run = guard.read_json(path)
    if not isinstance(run, dict) or not {"arm", "seed", "params", "config", "curve", "final_val"} <= run.keys():
        raise Refusal(f"{path}: not a results file (no arm, seed, params, config, curve, final_val in it)")
    return run


def load_rung(rung: str, folder: str) -> dict:
    """The bars file and whatever runs and evals of its compared arms and seeds exist: {"bars", "runs": {(arm, seed): ...}, "evals": {(arm, seed, kind): ...}}."""
    path = guard.HERE / "config" / f"bars_{rung}.json"
    bars = guard.read_json(path)
    if "compare" not in bars:
        raise Refusal(f"rung {rung} compares nothing: no verdict ({path.name})")
    runs, evals = {}, {}
    for arm in bars["compare"]:
        for seed in bars["seeds"]:
            name = f"{arm}_s{seed}"
            if (p := guard.HERE / "results" / folder / f"{name}.json").exists():
                runs[arm, seed] = read_run(p)
            for kind in ("best", "final"):
                if (p := guard.HERE / "evals" / folder / f"{name}_{kind}.json").exists():
                    evals[arm, seed, kind] = guard.read_json(p)
    probe = guard.HERE / "results" / folder / "lr_probe.json"
    probe = guard.read_json(probe) if probe.exists() else None
    return {"bars": bars, "bars_sha256": guard.sha256_file(path), "folder": folder, "runs": runs, "evals": evals, "probe": probe}


def missing(data: dict) -> list[str]:
    """The commands that would supply what the verdict lacks."""
    bars, folder = data["bars"], data["folder"]
    extra = "" if folder == bars["rung"] else f" --folder={folder}"
    out = []
    if "lr_grid" in bars and not data["probe"]:
        out.append(f"bash run.sh probe {bars['rung']}")
    for seed in bars["seeds"]:
        for arm in bars["compare"]:
            if data["runs"].get((arm, seed), {}).get("status") != "done":
                out.append(f"python train.py config/{arm}_{bars['rung']}.py --seed={seed} --resume=auto{extra}")
            wanted = [k for k in ("best", "final") if (arm, seed, k) not in data["evals"]] if bars["tasks"] else []
            if wanted:
                out.append("python eval.py " + " ".join(f"out/{folder}/{arm}_s{seed}/{k}.pt" for k in wanted))
    return out


# ---- audit ------------------------------------------------------------------------------------------------------------


def rule(out: list, name: str, values: dict) -> None:
    """All values of a dict {where: value} must be equal; appends (name, pass | fail | n/a, what was seen)."""
    seen: dict[str, str] = {}
    for where, v in values.items():
        text = f"{v:.9g}" if isinstance(v, float) else str(v)
        seen[text] = f"{seen[text]}, {where}" if text in seen else where
    if not seen or all(v is None for v in values.values()):
        out.append((name, "n/a", "nothing to compare" if not seen else "not recorded on this kind of device"))
    else:
        short = [f"{where}: {v[:40]}" for v, where in seen.items()]
        out.append((name, "pass" if len(seen) == 1 else "fail", short[0].split(": ", 1)[1] if len(seen) == 1 else " | ".join(short)))


def audit(data: dict) -> list[tuple[str, str, str]]:
    """Every rule that can make the comparison unfair or the record something else than registered, over the runs that are done."""
    bars, out = data["bars"], []
    runs = {f"{arm}_s{seed}": r for (arm, seed), r in data["runs"].items() if r["status"] == "done"}
    rule(out, "bars file as at each run's start", {"now": data["bars_sha256"], **{n: r["bars_sha256"] for n, r in runs.items()}})
    rule(out, "code identity equal", {n: r["code"]["code_sha256"] for n, r in runs.items()})
    for key in bars["config"]:
        want = {} if key == "lr" and "lr_grid" in bars else {"bars": bars["config"][key]}
        rule(out, f"config {key}", want | {n: r["config"].get(key, "not recorded") for n, r in runs.items()})
    rule(out, "lr as the probe found it", {"probe": data["probe"]["lr"], **{n: r["config"]["lr"] for n, r in runs.items()}} if data["probe"] else {})
    for arm in bars["compare"]:
        for key, said in bars["arms"][arm].items():
            rule(out, f"{arm} {key}", {"bars": said, **{n: r["config"].get(key, "not recorded") for n, r in runs.items() if r["arm"] == arm}})
        rule(out, f"{arm} parameters", {"bars": bars["arms"][arm]["expect_params"], **{n: r["params"] for n, r in runs.items() if r["arm"] == arm}})
    for name, r in runs.items():
        rule(out, f"{name}: untagged, and the run it is named", {"file": name, "run": r["name"]})
    rule(out, "train data", {n: r["data"]["train_sha256"] for n, r in runs.items()})
    rule(out, "val data", {n: r["data"]["val_sha256"] for n, r in runs.items()})
    for seed in bars["seeds"]:
        rule(out, f"seed {seed}: order of data", {n: r["order_sha256"] for n, r in runs.items() if r["seed"] == seed})
    rule(out, "eval steps", {n: [row["step"] for row in r["curve"]] for n, r in runs.items()})
    rule(out, "all steps done", {n: r["steps"] - r["step"] for n, r in runs.items()} | {"wanted": 0})
    rule(out, "compute dtype", {n: r["dtype"] for n, r in runs.items()})
    flops = [r["flops_per_token"] for r in runs.values()]
    if flops:
        equal = max(flops) <= 1.01 * min(flops)
        out.append(("FLOPs a token within 1%", "pass" if equal else "fail", f"{min(flops):.4g} to {max(flops):.4g}"))
    rule(out, "activation checkpoints", {n: r.get("ckpt", "not recorded") for n, r in runs.items()})
    rule(out, "parallel mode", {n: r["parallel"] for n, r in runs.items()})
    for name, r in runs.items():
        held, shards = [d["params_held"] for d in r["devices"]], r["config"].get("shard_ranks") or r["world_size"]
        even = (
            abs(sum(held) * shards / r["world_size"] / r["params"] - 1) < 0.01 and min(held) > 0.9 * max(held)
            if r["parallel"] == "fsdp"
            else set(held) == {r["params"]}
        )
        out.append((f"{name}: each rank's share of the parameters", "pass" if even else "fail", f"{min(held):,} to {max(held):,} of {r['params']:,}"))
        ids = [d["uuid"] for d in r["devices"]]
        rule(out, f"{name}: a device a rank", {"ranks": r["world_size"], "devices": len(set(ids))} if None not in ids else {"devices": None})
    return out + audit_evals(data, runs)


def audit_evals(data: dict, runs: dict) -> list[tuple[str, str, str]]:
    out, tasks = [], set(data["bars"]["tasks"])
    evals = {f"{arm}_s{seed}_{kind}": e for (arm, seed, kind), e in data["evals"].items()}
    for name, e in evals.items():
        run, kind = name.rsplit("_", 1)
        if run in runs:
            rule(out, f"{name}: the very checkpoint", {"trained": runs[run][kind]["sha256"], "scored": e["checkpoint_sha256"]})
        rule(out, f"{name}: the registered tasks", {"bars": sorted(tasks), "scored": sorted(e["tasks"])})
    rule(out, "evals: full sets", {"wanted": "no limit", **{n: "no limit" if e["limit"] is None else e["limit"] for n, e in evals.items()}})
    rule(out, "evals: lm-eval version", {n: e["lm_eval"] for n, e in evals.items()})
    rule(out, "evals: batch policy", {n: e["batch_policy"] for n, e in evals.items()})
    rule(out, "evals: the same items", {n: e["items_sha256"] for n, e in evals.items()})
    rule(
        out,
        "evals: the val set trained against",
        {**{n: e["val"]["sha256"] for n, e in evals.items()}, **{n: r["data"]["val_sha256"] for n, r in runs.items()}},
    )
    return out


# ---- verdict ----------------------------------------------------------------------------------------------------------


def best_row(run: dict) -> dict:
    return min(run["curve"], key=lambda row: row["val_loss"])


def seed_row(data: dict, seed: int) -> dict | None:
    """One seed's numbers at the primary checkpoint, or None where a piece is missing. Gaps are L - V."""
    bars = data["bars"]
    treated, control = bars["compare"]
    runs = [data["runs"].get((arm, seed)) for arm in (treated, control)]
    evals = {(arm, kind): data["evals"].get((arm, seed, kind)) for arm in (treated, control) for kind in ("best", "final")}
    if not all(r and r["status"] == "done" for r in runs) or (bars["tasks"] and not all(evals.values())):
        return None
    kind = bars["primary_checkpoint"]
    best, final = [best_row(r)["val_loss"] for r in runs], [r["final_val"] for r in runs]
    suite = [evals[arm, kind]["mean"] for arm in (treated, control)] if bars["tasks"] else [0.0, 0.0]
    row = {"seed": seed, "best": best, "final": final, "suite": suite}
    primary = best if kind == "best" else final
    row |= {"val_gap": primary[0] - primary[1], "suite_gap": suite[0] - suite[1]}
    row["passes"] = row["val_gap"] <= bars["bars"]["val_gap_max"] and (not bars["tasks"] or row["suite_gap"] >= bars["bars"]["suite_gap_min"])
    return row


def how_killed(rows: list[dict], bars: dict) -> str:
    """In words, by the mean val gap of the seeds at hand; the noise is assumed, not measured."""
    gap = sum(r["val_gap"] for r in rows) / len(rows)
    treated, control = bars["compare"]
    if gap > 2 * NOISE_SD:
        return f"{treated} is worse than {control}"
    if gap > -2 * NOISE_SD:
        return f"no difference seen between {treated} and {control} (|gap| within twice the assumed noise of {NOISE_SD} nats)"
    failed = [r["seed"] for r in rows if not r["passes"]]
    val_ok = all(r["val_gap"] <= bars["bars"]["val_gap_max"] for r in rows)
    return f"{treated} is better on val (mean gap {gap:+.4f}), but misses {'the suite bar' if val_ok else 'a bar'} on seed {' and '.join(map(str, failed))}"


def decide(data: dict) -> dict:
    """{"word", "why", "rows", "audit", "missing"}: the verdict by the letter of the bars file."""
    bars = data["bars"]
    checks, gaps, rows = audit(data), missing(data), [seed_row(data, s) for s in bars["seeds"]]
    rows = [r for r in rows if r]
    broken = [f"{name}: {seen}" for name, status, seen in checks if status == "fail"]
    failed = [r for r in rows if not r["passes"]]
    if broken:
        word, why = INVALID, f"{len(broken)} rule{'s' if len(broken) > 1 else ''} broken, first: {broken[0]}"
    elif failed:
        word, why = KILLED, how_killed(rows, bars)
    elif gaps:
        word, why = INCOMPLETE, f"{len(gaps)} pieces are missing"
    else:
        word, why = CONFIRMED, "both bars met on every seed"
    return {"word": word, "why": why, "rows": rows, "audit": checks, "missing": gaps}


# ---- output -----------------------------------------------------------------------------------------------------------


def print_audit(checks: list, verbose: bool) -> None:
    count = {s: sum(status == s for _, status, _ in checks) for s in ("pass", "fail", "n/a")}
    print(f"audit: {count['pass']} pass, {count['fail']} fail, {count['n/a']} n/a" + ("" if verbose else "  (--audit lists every rule)"))
    for name, status, seen in checks:
        if verbose or status == "fail":
            print(f"  {status:4}  {name:36}  {seen}")


def print_table(verdict: dict, bars: dict) -> None:
    treated, control = bars["compare"]
    limit = bars["bars"]
    print(
        f"\n{'':14}{control + ' best':>9}{treated + ' best':>9}{'gap':>9}   {control + ' final':>9}{treated + ' final':>9}{'gap':>9}   {control + ' suite':>9}{treated + ' suite':>9}{'gap':>8}   bars"
    )
    for r in verdict["rows"]:
        print(
            f"seed {r['seed']:<9}{r['best'][1]:9.4f}{r['best'][0]:9.4f}{r['best'][0] - r['best'][1]:+9.4f}   {r['final'][1]:9.4f}{r['final'][0]:9.4f}{r['final'][0] - r['final'][1]:+9.4f}"
            f"   {r['suite'][1]:9.2f}{r['suite'][0]:9.2f}{r['suite_gap']:+8.2f}   {'met' if r['passes'] else 'missed'}"
        )
    suite = f" AND suite gap >= +{limit['suite_gap_min']} point" if bars["tasks"] else " (no suite at this rung)"
    print(f"bars: val gap {treated}-{control} <= {limit['val_gap_max']} nats{suite}, at the {bars['primary_checkpoint']}-val checkpoint, on every seed")


def print_verdict(verdict: dict, data: dict, verbose: bool = False) -> None:
    bars = data["bars"]
    print(f"{data['folder']}: {bars['claim']}")
    print_audit(verdict["audit"], verbose)
    if verdict["rows"]:
        print_table(verdict, bars)
    print(f"\n{verdict['word']}: {verdict['why']}\n(rung {bars['rung']}, role {bars['role']}: {bars['role_text']})")
    if gate := bars.get("gate"):
        bypass = guard.HERE / "results" / data["folder"] / "gate_bypassed.json"
        said = f"; it was bypassed (--anyway) when it was {guard.read_json(bypass)['word']}" if bypass.exists() else ""
        print(f"gate {gate}: {decide(load_rung(gate, gate))['word']}{said}")
    if verdict["word"] == INCOMPLETE:
        print("missing; these commands supply it:\n  " + "\n  ".join(verdict["missing"]))


def print_beside(mine: dict, data: dict) -> None:
    """A replication beside the record: the same table from other hands."""
    record_data = load_rung(data["bars"]["rung"], data["bars"]["rung"])
    if not data["runs"]:
        return
    if not record_data["runs"]:
        print("\nno record of this rung to compare with")
        return
    record = decide(record_data)
    print(f"\nthe record (results/{data['bars']['rung']}): {record['word']}: {record['why']}")
    print(f"{'':14}{'val gap':>12}{'record':>12}{'suite gap':>14}{'record':>12}")
    theirs = {r["seed"]: r for r in record["rows"]}
    for r in mine["rows"]:
        if t := theirs.get(r["seed"]):
            print(f"seed {r['seed']:<9}{r['val_gap']:+12.4f}{t['val_gap']:+12.4f}{r['suite_gap']:+14.2f}{t['suite_gap']:+12.2f}")
    for what, get in {
        "data": lambda r: r["data"]["train_sha256"],
        "code": lambda r: r["code"]["code_sha256"],
        "torch": lambda r: r["versions"]["torch"],
    }.items():
        a, b = ({get(r)[:12] for r in d["runs"].values()} for d in (data, record_data))
        print(f"{what:6} {'the same as the record' if a == b else f'differs: {sorted(a)} against {sorted(b)}'}")


def draw_curves(data: dict, path: Path) -> None:
    """Val loss of every run over tokens, minima marked, epochs on the top axis. Rewrites the PNG only if it changes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {key: run for key, run in data["runs"].items() if len(run["curve"]) > 1}
    if not shown:
        return
    fig, ax = plt.subplots(figsize=(8, 4.5), dpi=150)
    for (arm, seed), run in sorted(shown.items()):
        rows, low = [r for r in run["curve"] if r["step"]], best_row(run)
        ax.plot(
            [r["tokens"] for r in rows],
            [r["val_loss"] for r in rows],
            "-" if seed == 0 else "--",
            color=COLOURS[arm],
            lw=1.6,
            label=f"{arm} seed {seed}: best {low['val_loss']:.3f}",
        )
        ax.plot(low["tokens"], low["val_loss"], "o" if seed == 0 else "D", color=COLOURS[arm], ms=6, mec="white")
    run = next(iter(shown.values()))
    lows, ends = [best_row(r)["val_loss"] for r in shown.values()], [r["curve"][-1]["val_loss"] for r in shown.values()]
    ax.set_ylim(min(lows) - 0.1, max(max(ends), min(lows) + 0.5) + 0.3)
    per_epoch = run["data"]["unique_tokens"]
    top = ax.secondary_xaxis("top", functions=(lambda t: t / per_epoch, lambda e: e * per_epoch))
    top.set_xlabel("epochs over the unique tokens")
    ax.set(
        xlabel="training tokens",
        ylabel="val loss, nats a token",
        title=f"{data['folder']}: vanilla (V) against looped (L), equal FLOPs; marks at the minima",
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", bbox_inches="tight", metadata={"Software": None})
    plt.close(fig)
    if not path.exists() or path.read_bytes() != buffer.getvalue():
        guard.replace_file(path, lambda f: f.write(buffer.getvalue()))
    print(f"figure: {path.relative_to(guard.HERE)}")


# ---- published curves -------------------------------------------------------------------------------------------------


def published(folder: Path) -> None:
    """Best, final and gap to the vanilla arm for a folder of <phase>_<arm>_s<seed>.json (A: vanilla; C, E3: looped; 768: width)."""
    runs = {p.stem: read_run(p) for p in sorted(folder.glob("*.json"))}
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
    runs = [r for r in map(read_run, paths) if r["status"] == "done" or "loss nan" in (r["traceback"] or "") or "loss inf" in (r["traceback"] or "")]
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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rung", help="nano, flip, 400m, 1b, or a folder of published curves")
    p.add_argument("--folder", help="folder under results/ and evals/; default: the rung")
    p.add_argument("--audit", action="store_true", help="list every rule")
    p.add_argument("--probe", action="store_true", help="pick the LR from the finished probes")
    p.add_argument("--word", action="store_true", help="print the verdict's one word only")
    args = p.parse_args()
    if not (guard.HERE / "config" / f"bars_{args.rung}.json").exists():
        if Path(args.rung).is_dir():
            return published(Path(args.rung))
        raise Refusal(f'"{args.rung}" is neither a rung (config/bars_{args.rung}.json) nor a folder of published curves')
    if args.probe:
        return pick_lr(args.rung, args.folder or args.rung)
    data = load_rung(args.rung, args.folder or args.rung)
    verdict = decide(data)
    if args.word:
        return print(verdict["word"])
    if data["runs"]:
        draw_curves(data, guard.HERE / "results" / data["folder"] / "curves.png")
    print_verdict(verdict, data, args.audit)
    if data["folder"] != args.rung:
        print_beside(verdict, data)
    sys.exit(0 if verdict["word"] in (CONFIRMED, KILLED) else 1)


if __name__ == "__main__":
    main()
