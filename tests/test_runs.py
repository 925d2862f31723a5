"""train.py as real processes: the same numbers on two ranks, bit-equal after an interruption, refusals that destroy nothing."""

import hashlib
import json
import os
import shutil
import signal
import time

import pytest
import torch
from project import wait_for

import guard


def record(p, name: str, folder: str = "nano") -> dict:
    return json.loads((p.path / f"results/{folder}/{name}.json").read_text())


def losses(run: dict) -> list[tuple]:
    return [(row["step"], row["train_loss"], row["val_loss"], row["gnorm"]) for row in run["curve"]]


def weights(p, name: str, kind: str = "final") -> dict:
    return torch.load(p.path / f"out/nano/{name}/{kind}.pt", weights_only=True)["model"]


def test_two_ranks_equal_one_process(project):
    """The same global batches, whatever the ranks and the accumulation; V and L, both orders."""
    for arm, extra in (("L", []), ("V", []), ("L", ["--loop_order=stack"])):
        steps = ["--max_steps=12", "--eval_every=2", *extra]
        project.ok("train.py", *project.tiny(arm, *steps, "--tag=one"))
        project.ok("train.py", *project.tiny(arm, *steps, "--tag=two"), ranks=2)
        project.ok("train.py", *project.tiny(arm, *steps, "--tag=accum", "--micro_batch=1"))
        one = losses(record(project, f"{arm}_s0_one"))
        assert len(one) == 7
        for tag, ranks, accum in (("two", 2, 1), ("accum", 1, 4)):
            other = record(project, f"{arm}_s0_{tag}")
            assert (other["world_size"], other["accum"], len(other["devices"])) == (ranks, accum, ranks)
            for a, b in zip(one, losses(other), strict=True):
                assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_resumed_is_bit_equal(project, how):
    """An epoch boundary (62.25 steps) and evals lie on both sides of the interruption."""
    steps = ["--max_steps=90", "--eval_every=7", "--save_every=5", "--log_every=1", "--resume=auto"]
    project.ok("train.py", *project.tiny("L", *steps, "--tag=whole"))
    p = project.start(*project.tiny("L", *steps, "--tag=cut"))
    wait_for(p, "step 41/90")
    p.send_signal(how)
    out = p.communicate(timeout=240)[0]
    if how != signal.SIGKILL:
        assert p.returncode == 128 + how
        assert "--resume=auto goes on" in out
        assert record(project, "L_s0_cut")["status"] == "preempted"
    assert "resumed at step" in project.ok("train.py", *project.tiny("L", *steps, "--tag=cut"))
    whole, cut = record(project, "L_s0_whole"), record(project, "L_s0_cut")
    assert losses(whole) == losses(cut)
    assert whole["order_sha256"] == cut["order_sha256"]
    for kind in ("best", "final"):
        a, b = weights(project, "L_s0_whole", kind), weights(project, "L_s0_cut", kind)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert "done already" in project.ok("train.py", *project.tiny("L", *steps, "--tag=cut"))


def test_a_resume_has_the_best_of_its_own_state(project):
    """An eval after the last save replaced best.pt, the process was killed, and the resumed run never again sees a loss so low."""
    steps = ["--save_every=10", "--eval_every=10", "--lr=5e-3"]
    project.ok("train.py", *project.tiny("L", *steps, "--max_steps=30"))
    out, run = project.path / "out/nano/L_s0_t", record(project, "L_s0_t")
    saved = json.loads((out / "last/trainer.json").read_text())
    assert guard.sha256_file(out / "last/best.pt") == saved["best"]["sha256"] == run["best"]["sha256"]
    (out / "newer").write_bytes(b"weights of a later step")
    os.replace(out / "newer", out / "best.pt")
    guard.restore_best(out, out / "last")
    assert guard.sha256_file(out / "best.pt") == run["best"]["sha256"]
    (out / "newer").write_bytes(b"weights of a later step")
    os.replace(out / "newer", out / "best.pt")
    saved["best"]["val_loss"] = 0.0  # nothing after this is better
    state = out / "last/trainer.json"
    state.write_text(json.dumps(saved | {"step": 30, "status": "running"}))
    digests = json.loads((out / "last/digests.json").read_text()) | {"trainer.json": guard.sha256_file(state)}
    (out / "last/digests.json").write_text(json.dumps(digests))
    result = project.path / "results/nano/L_s0_t.json"
    result.write_text(json.dumps(run | {"status": "running"}))
    project.ok("train.py", *project.tiny("L", *steps, "--max_steps=40", "--resume=auto", "--force_resume"))
    run = record(project, "L_s0_t")
    assert (run["step"], run["best"]["val_loss"]) == (40, 0.0)
    assert guard.sha256_file(out / "best.pt") == run["best"]["sha256"], "the record's best is the file that stands"


def test_no_run_goes_on_with_other_code(project):
    """Neither a resume nor a fresh start under an old name may return the numbers of earlier code."""
    steps = ["--max_steps=8", "--save_every=4", "--eval_every=4", "--log_every=1"]
    project.ok("train.py", *project.tiny("L", *steps))
    before = losses(record(project, "L_s0_t"))
    model = project.path / "model.py"
    model.write_text(model.read_text() + "\n# edited\n")
    assert "by other code" in project.ok("train.py", *project.tiny("L", *steps, "--resume=auto"))
    (project.path / "results/nano/L_s0_t.json").unlink()
    assert "the code" in project.refused("train.py", *project.tiny("L", *steps, "--resume=auto"))
    model.write_text(model.read_text().replace("F.silu", "F.gelu"))
    p = project.start(*project.tiny("L", *steps))  # an ablation in place, under the same tag: starts over
    wait_for(p, "step 2/8")
    p.kill()
    p.wait()
    assert "started at step 0" in project.ok("train.py", *project.tiny("L", *steps, "--resume=auto"))
    assert losses(record(project, "L_s0_t")) != before


def test_killed_launcher_leaves_no_worker(project):
    p = project.start(*project.tiny("L", "--tag=orphan", "--log_every=1", "--epochs=500"), ranks=2)
    wait_for(p, "gnorm")
    workers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_child(int(pid), p.pid)]
    assert len(workers) == 2
    p.kill()
    p.wait()
    deadline = time.monotonic() + 20
    while any(_alive(w) for w in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(_alive(w) for w in workers)


def _is_child(pid: int, parent: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rsplit(")", 1)[1].split()[1]) == parent
    except (FileNotFoundError, ProcessLookupError):
        return False


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_runs_on_one_folder(project):
    p = project.start(*project.tiny("L", "--tag=busy", "--log_every=1", "--epochs=500"))
    wait_for(p, "gnorm")
    assert f"process {p.pid}" in project.refused("train.py", *project.tiny("L", "--tag=busy"))
    p.kill()
    p.communicate()
    project.ok("train.py", *project.tiny("L", "--tag=busy", "--max_steps=2"))


def test_bad_data_is_refused(project):
    """Each fault: one line, non-zero exit, nothing written. The data is put back after each."""
    data, good = project.path / "data/tiny", project.path / "good"
    shutil.copytree(data, good)
    train, val = (good / "train.bin").read_bytes(), (good / "val.bin").read_bytes()
    manifest = json.loads((good / "manifest.json").read_text())

    def said(**changes) -> bytes:
        return json.dumps({**manifest, **changes}).encode()

    def resized(split: str, body: bytes) -> dict:
        return {split: {**manifest[split], "tokens": len(body) // 2, "sha256": hashlib.sha256(body).hexdigest()}}

    constant = b"\x20\x00" * 8000
    high = train[:-2] + b"\x01\x01"
    cases = [
        ("train.bin", None, "no such file", []),
        ("train.bin", b"", "truncated", []),
        ("train.bin", train[:-1], "uint16", []),
        ("val.bin", val[:-2], "manifest.json says 6,000", []),
        ("train.bin", train[2:] + train[:2], "sha256", []),
        ("manifest.json", None, "no such file", []),
        ("manifest.json", b"{", "JSON", []),
        ("manifest.json", b"[]", "not a manifest", []),
        ("manifest.json", said(train={"tokens": 8000}), "not a manifest", []),
        ("manifest.json", said(zlib_ratio=0.05), "zlib ratio of the text is 0.0500, the limit is >= 0.10", []),
        ("train.bin", high, "257 is outside the vocabulary", [("manifest.json", said(**resized("train", high)))]),
        ("train.bin", constant, "commonest token is 1.0000", [("manifest.json", said(**resized("train", constant)))]),
        ("val.bin", train[:12000], "found in train", [("manifest.json", said(**resized("val", train[:12000])))]),
    ]
    for name, body, word, more in cases:
        for file, content in [(name, body), *more]:
            (data / file).unlink()
            if content is not None:
                (data / file).write_bytes(content)
        line = project.refused("train.py", *project.tiny("V", "--tag=bad"))
        assert word in line, (name, line)
        assert not (project.path / "results").exists()
        for file in good.iterdir():
            if file.is_file():
                shutil.copy(file, data / file.name)
    for override, word in (("--unique_tokens=7999", "wants exactly 7,999"), ("--window=20000", "no window"), ("--expect_params=1", "expect_params")):
        assert word in project.refused("train.py", *project.tiny("V", override))
    project.ok("train.py", *project.tiny("V", "--max_steps=1"))


def test_a_registered_run_is_never_overwritten(project):
    path = project.path / "results/nano/V_s0.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"status": "done", "code": {"code_sha256": "x"}}')
    before = path.read_bytes()
    shutil.rmtree(project.path / "data/tiny")
    shutil.copytree(_nano_data(project), project.path / "data/nano")
    assert "--resume=auto" in project.refused("train.py", "config/V_nano.py")
    assert "done already, by other code" in project.ok("train.py", "config/V_nano.py", "--resume=auto")
    assert path.read_bytes() == before


def _nano_data(project):
    project.ok("prepare.py", "stdlib", "--out=made", "--tokens=32000", "--val_tokens=150000", "--seed=3")
    return project.path / "made"


def test_a_failure_is_recorded(project):
    """A first loss outside its bounds stops the run, and the results file says so."""
    (project.path / "model.py").write_text((project.path / "model.py").read_text().replace("else 0.02, gen", "else 2.0, gen"))
    assert "first loss" in project.refused("train.py", *project.tiny("V"))
    run = record(project, "V_s0_t")
    assert run["status"] == "failed"
    assert "first loss" in run["traceback"]
    assert not (project.path / "out/nano/V_s0_t/final.pt").exists()


def test_wandb_mirrors_the_rows(project):
    """A stand-in module in the project's folder sees the calls; without one the run refuses before it starts."""
    if shutil.which("wandb") is None:
        assert "wandb is not installed" in project.refused("train.py", *project.tiny("V", "--wandb_project=p"))
    (project.path / "wandb.py").write_text(
        "import json\n"
        "def init(**kwargs): open('init.json', 'w').write(json.dumps(kwargs))\n"
        "def log(row, step): open('rows.jsonl', 'a').write(json.dumps([step, row]) + '\\n')\n"
    )
    project.ok("train.py", *project.tiny("V", "--wandb_project=p", "--max_steps=4", "--eval_every=2"))
    rows = [json.loads(line) for line in (project.path / "rows.jsonl").read_text().splitlines()]
    assert [step for step, _ in rows] == [0, 2, 4]
    assert [row["val_loss"] for _, row in rows] == [row["val_loss"] for row in record(project, "V_s0_t")["curve"]]
    assert json.loads((project.path / "init.json").read_text())["project"] == "p"
