"""What a rented node does to a run, done to real processes: kills, signals, full disks, damaged saves, hangs, NaN. After each: nothing of
the run is left running, the saved state stands, the message says what to do, and the resumed curve equals the uninterrupted one.

DRILLS=20 pytest tests/test_drills.py -k random     # the full count of random kills
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from project import ROOT, wait_for

STEPS = ["--max_steps=30", "--eval_every=7", "--save_every=5", "--log_every=1", "--resume=auto"]


@pytest.fixture
def p(project):
    shutil.copy(ROOT / "tests/drill.py", project.path)
    return project


@pytest.fixture(scope="module")
def truth(tmp_path_factory, tiny_data):
    """The uninterrupted run's curve and weights, one process and two ranks."""
    from project import Project

    whole = Project(tmp_path_factory.mktemp("truth"))
    shutil.copytree(tiny_data, whole.path / "data" / "tiny")
    for ranks in (0, 2):
        whole.ok("train.py", *whole.tiny("L", *STEPS, f"--tag=r{ranks}"), ranks=ranks)
    return {ranks: (curve(whole, f"L_s0_r{ranks}"), weights(whole, f"L_s0_r{ranks}")) for ranks in (0, 2)}


def record(p, name: str = "L_s0_t") -> dict:
    return json.loads((p.path / f"results/nano/{name}.json").read_text())


def curve(p, name: str = "L_s0_t") -> list[tuple]:
    return [(r["step"], r["train_loss"], r["val_loss"], r["gnorm"], r["clipped"], tuple(r["rms"])) for r in record(p, name)["curve"]]


def weights(p, name: str = "L_s0_t") -> dict:
    return torch.load(p.path / f"out/nano/{name}/final.pt", weights_only=True)["model"]


def start(p, drill: str, *more: str, ranks: int = 0, launch: tuple = ()) -> subprocess.Popen:
    command = p.command("drill.py", *p.tiny("L", *STEPS, *more), ranks=ranks)
    command[3:3] = launch if ranks else ()
    process = subprocess.Popen(command, cwd=p.path, env=os.environ | {"DRILL": drill}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    p.started.append(process)
    return process


def still_there(p) -> list[int]:
    """Processes whose working directory is the project's."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if (proc / "cwd").resolve() == p.path and (proc / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(proc.name))
        except OSError:
            continue
    return found


def gone(p, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while still_there(p) and time.monotonic() < end:
        time.sleep(0.1)
    return not still_there(p)


def goes_on(p, truth, ranks: int = 0) -> None:
    """The next start, without the fault, ends where the uninterrupted run ended, bit for bit."""
    assert gone(p)
    out = p.ok("train.py", *p.tiny("L", *STEPS), ranks=ranks)
    assert "resumed at step" in out or "started at step 0" in out
    assert curve(p) == truth[ranks][0]
    ours = weights(p)
    assert all(torch.equal(ours[k], v) for k, v in truth[ranks][1].items())
    assert record(p)["status"] == "done"


@pytest.mark.parametrize("drill, when", [("", "step 12/30"), ("slow eval", "step 14/30"), ("slow save", "step 10/30")], ids=["step", "eval", "save"])
def test_sigterm(p, truth, drill, when):
    """To torchrun, which passes it on: the ranks agree, save and leave; in an eval and in a save too."""
    run = start(p, drill, ranks=2)
    wait_for(run, when)
    time.sleep(0.3)
    run.terminate()
    out = run.communicate(timeout=240)[0]
    assert record(p)["status"] == "preempted", out
    assert "--resume=auto goes on" in out
    assert record(p)["step"] < 30
    goes_on(p, truth, 2)


def test_sigterm_while_warming_up(p, truth):
    run = start(p, "", ranks=2)
    time.sleep(2.0)  # importing
    run.terminate()
    run.communicate(timeout=240)
    goes_on(p, truth, 2)


@pytest.mark.parametrize("restarts", [0, 1])
def test_kill_9_of_one_rank(p, truth, restarts):
    """The other ends within a minute, says so in the record; with --max-restarts torchrun goes on by itself."""
    run = start(p, "", "--timeout_min=1", ranks=2, launch=(f"--max-restarts={restarts}",))
    wait_for(run, "step 12/30")
    victim = max(pid for pid in still_there(p) if pid != run.pid)
    os.kill(victim, signal.SIGKILL)
    start_of_end = time.monotonic()
    out = run.communicate(timeout=300)[0]
    if restarts:
        assert run.returncode == 0, out
        assert curve(p) == truth[2][0]
        assert gone(p)
    else:
        assert run.returncode != 0
        assert time.monotonic() - start_of_end < 60
        assert record(p)["status"] in ("failed", "running")
        goes_on(p, truth, 2)
    assert record(p)["status"] == "done"


def test_out_of_memory_on_one_rank(p, truth):
    run = start(p, "oom", ranks=2)
    out = run.communicate(timeout=300)[0]
    assert run.returncode != 0
    failed = record(p)
    assert failed["status"] == "failed"
    assert failed["traceback"].startswith("rank 1, step 1: ")
    assert "OutOfMemoryError" in failed["traceback"], out
    goes_on(p, truth, 2)


@pytest.mark.parametrize("ranks", [0, 2])
def test_nan_stops_every_rank_before_the_update(p, truth, ranks):
    run = start(p, "nan", "--save_every=1", ranks=ranks)
    run.communicate(timeout=300)
    failed = record(p)
    assert failed["status"] == "failed"
    assert "step 3: loss nan" in failed["traceback"]
    assert "windows [" in failed["traceback"]
    assert failed["step"] == 3
    goes_on(p, truth, ranks)


def test_a_hang_ends_itself(p, truth):
    run = start(p, "hang", "--timeout_min=0.1", ranks=2)
    run.communicate(timeout=300)
    failed = record(p)
    assert failed["status"] == "failed"
    assert "nothing moved for 0.1 minutes" in failed["traceback"]
    goes_on(p, truth, 2)


def test_random_kills_during_saves(p, truth):
    """kill -9 at random moments of a run that does little but save: whatever is left on disk, the next start goes on from it."""
    rng, kills = random.Random(0), int(os.environ.get("DRILLS", "4"))
    for _ in range(kills):
        run = start(p, "saving", "--save_every=1")
        wait_for(run, "at step")
        time.sleep(rng.uniform(0.1, 1.5))
        run.kill()
        run.communicate()
        if (p.path / "out/nano/L_s0_t/final.pt").exists():
            break
    goes_on(p, truth)


@pytest.mark.parametrize("how", ["truncated", "bit-flipped", "empty", "missing"])
def test_damaged_save(p, truth, how):
    """Named, and the one before is used; where both are damaged nothing is trained over them."""
    run = start(p, "")
    wait_for(run, "step 17/30")
    run.terminate()
    run.communicate()
    out = p.path / "out/nano/L_s0_t"
    for state in ("last", "last.old"):
        part = next((out / state).glob("__0_0*"))
        body = bytearray(part.read_bytes())
        body[len(body) // 2] ^= 1
        part.write_bytes({"truncated": body[:-100], "bit-flipped": body, "empty": b"", "missing": b""}[how])
        if how == "missing":
            part.unlink()
        if state == "last":
            shutil.copytree(out, p.path / "kept")
            said = p.ok("train.py", *p.tiny("L", *STEPS))
            assert "last: damaged" in said
            assert "resumed at step" in said
            assert curve(p) == truth[0][0]
            shutil.rmtree(out)
            shutil.move(p.path / "kept", out)
            (p.path / "results/nano/L_s0_t.json").unlink()
    done = p.run("train.py", *p.tiny("L", *STEPS))
    assert done.returncode == 1
    assert "no whole resume state is left" in done.stderr


def test_full_disk(p, truth):
    """On a tmpfs that fills: the save fails and is said, the run goes on over the older state; with no room for final.pt it stops; then goes on."""
    out = p.path / "out"
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(out)], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run = start(p, "slow step", "--eval_every=100")
        wait_for(run, "step  7/30")  # one state is saved, and the next needs room beside it
        (out / "filler").write_bytes(b"x" * (shutil.disk_usage(out).free - 4096))
        said = run.communicate(timeout=300)[0]
        assert "save failed" in said
        assert "final.pt could not be written" in said
        assert run.returncode == 1
        assert "Traceback" not in said.split("final.pt could not")[0]
        (out / "filler").unlink()
        said = p.ok("train.py", *p.tiny("L", *STEPS, "--eval_every=100"))
        assert "resumed at step" in said
        ours = weights(p)
        assert all(torch.equal(ours[k], v) for k, v in truth[0][1].items())
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_changed_bin_or_code_between_start_and_resume(p, truth):
    run = start(p, "")
    wait_for(run, "step 12/30")
    run.terminate()
    run.communicate()
    train = p.path / "data/tiny/train.bin"
    good = train.read_bytes()
    train.write_bytes(good[2:] + good[:2])
    assert "sha256 differs" in p.refused("train.py", *p.tiny("L", *STEPS))
    manifest = p.path / "data/tiny/manifest.json"
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**said, "train": {**said["train"], "sha256": hashlib.sha256(train.read_bytes()).hexdigest()}}))
    assert "cannot resume, data was" in p.refused("train.py", *p.tiny("L", *STEPS))
    train.write_bytes(good)
    manifest.write_text(json.dumps(said))
    assert "warmup was 30 and is 31" in p.refused("train.py", *p.tiny("L", *STEPS, "--warmup=31"))
    forced = p.ok("train.py", *p.tiny("L", *STEPS, "--warmup=31", "--force_resume"))
    assert "resumed" in forced
    assert any(e["event"] == "forced: warmup was 30 and is 31" for e in record(p)["events"])


def test_leftovers_are_named(p):
    """What run.sh asks after each run and before the next."""
    run = p.start(*p.tiny("L", "--epochs=500", "--log_every=1"))
    wait_for(run, "gnorm")
    assert f"pid {run.pid}: " in p.refused("guard.py", "leftovers")
    assert f"left over: pid {run.pid}" in (p.path / "results/LEDGER.md").read_text()
    run.kill()
    run.wait()
    p.ok("guard.py", "leftovers")


def test_a_busy_gpu_is_named_and_refused(p):
    """With a stand-in nvidia-smi: processes by pid, memory and command, or memory alone where a container hides them."""
    tool = p.path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    path = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    for apps, used, words in (
        ("4242, 70123, python train.py", "70200", "pid 4242, 70123 MiB, python train.py"),
        ("", "70200", "70200 MiB in use"),
        ("", "3", ""),
    ):
        tool.write_text(f'#!/bin/sh\ncase "$*" in *compute-apps*) echo "{apps}";; *memory.used*) echo "{used}";; esac\n')
        tool.chmod(0o755)
        args = p.tiny("L", "--max_steps=1")
        if words:
            assert words in p.refused("train.py", *args, env=path)
            p.ok("train.py", *args, "--allow_busy", env=path)
        else:
            p.ok("train.py", *args, env=path)


def test_ledger_has_a_line_for_each_event_of_a_recorded_run(p):
    """Of a registered name in the rung's own folder, not of a tagged run."""
    bars = p.path / "config/bars_nano.json"
    held = json.loads(bars.read_text())
    held["arms"]["L"] = {"n_layer": 3}
    held["config"] = {}
    bars.write_text(json.dumps(held))
    config = p.path / "config/L_tiny.py"
    config.write_text(
        'base = "L_nano.py"\n' + "\n".join(f"{k} = {v!r}" for k, v in (kv[2:].split("=") for kv in p.tiny("L")[2:] if "data" not in kv)).replace("'", "")
    )
    config.write_text(config.read_text() + '\ndata = "data/tiny"\nepochs = 2\neval_every = 40\n')
    run = subprocess.Popen(p.command("train.py", "config/L_tiny.py", "--resume=auto", "--log_every=1"), cwd=p.path, stdout=subprocess.PIPE, text=True)
    wait_for(run, "step  12/")
    run.terminate()
    run.communicate()
    p.ok("train.py", "config/L_tiny.py", "--resume=auto")
    p.ok("train.py", *p.tiny("L", "--max_steps=1"))
    lines = (p.path / "results/LEDGER.md").read_text().splitlines()
    events = [line.split("|")[3].strip() for line in lines if "nano L_s0" in line]
    assert [e.split(":")[0] for e in events] == ["started", "preempted by signal 15", "resumed", "done"]
    assert "1 x 4 windows on each of 1 cpu, single, float32, ckpt none" in events[2]
    assert not any("_t" in line for line in lines[4:])
