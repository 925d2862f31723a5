"""The quick test, under a minute: the real scripts end to end, tiny. python test_smoke.py, or pytest test_smoke.py.

Everything happens in a copy of the project in a temporary folder; the record is not touched.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
from project import Project


def run_smoke(folder: Path) -> None:
    p = Project(folder)
    p.ok("prepare.py", "stdlib", "--out=data/tiny", "--tokens=8000", "--val_tokens=6000", "--seed=5", "--suite")
    for arm in ("V", "L"):
        out = p.ok("train.py", *p.tiny(arm, "--max_steps=20", "--eval_every=10", "--window=128", "--lr=3e-3"))
        assert "done: best val" in out
        run = json.loads((folder / f"results/nano/{arm}_s0_t.json").read_text())
        losses = [row["val_loss"] for row in run["curve"]]
        assert [row["step"] for row in run["curve"]] == [0, 10, 20]
        assert losses[0] > losses[1] > losses[2]
        assert run["status"] == "done"
    out = p.ok("eval.py", "out/nano/L_s0_t/best.pt")
    assert "cloze" in out
    scored = json.loads((folder / "evals/nano/L_s0_t_best.json").read_text())
    assert abs(scored["val"]["loss"] - run["best"]["val_loss"]) < 1e-4
    assert len(scored["items"]["cloze"]) == len(scored["items"]["lastword"]) == 500
    assert "def main(" in p.ok("eval.py", "out/nano/L_s0_t/best.pt", "--sample=def main(", "--max_new=5")
    verdict = p.run("verdict.py", "nano")
    assert verdict.returncode == 1
    assert "INCOMPLETE" in verdict.stdout
    assert "train.py config/L_nano.py --seed=1" in verdict.stdout


def test_smoke(tmp_path):
    run_smoke(tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_smoke(Path(folder))
    print("smoke test passed")
