"""Shared by the tests: a copy of the project in a temporary folder and ways to run its scripts for real. Needs no pytest: the smoke test uses it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run of seconds: 4 windows of 32 a step, an epoch of 249 windows
TINY = [
    "--tag=t",
    "--unique_tokens=8000",
    "--val_tokens=6000",
    "--window=32",
    "--n_embd=32",
    "--ffn_hidden=48",
    "--batch=4",
    "--micro_batch=4",
    "--data=data/tiny",
]
TINY_PARAMS = {"V": 6 * (4 * 32**2 + 3 * 32 * 48 + 64) + 2 * 257 * 32 + 32, "L": 3 * (4 * 32**2 + 3 * 32 * 48 + 64) + 2 * 257 * 32 + 32}


class Project:
    """A copy of the scripts and configs, without git, as on a rented node."""

    def __init__(self, folder: Path):
        self.path = folder
        for f in ROOT.glob("*.py"):
            shutil.copy(f, folder)
        shutil.copy(ROOT / "run.sh", folder)
        self.started: list[subprocess.Popen] = []
        shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("__pycache__"))

    def command(self, script: str, *args: str, ranks: int = 0) -> list[str]:
        launch = [sys.executable] if not ranks else [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
        return [*launch, script, *args]

    def run(self, script: str, *args: str, ranks: int = 0, env: dict | None = None, timeout: float = 600) -> subprocess.CompletedProcess:
        command = self.command(script, *args, ranks=ranks)
        return subprocess.run(command, check=False, cwd=self.path, env=os.environ | (env or {}), capture_output=True, text=True, timeout=timeout)

    def ok(self, script: str, *args: str, **kwargs) -> str:
        done = self.run(script, *args, **kwargs)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, script: str, *args: str, **kwargs) -> str:
        """The one line of a refusal."""
        done = self.run(script, *args, **kwargs)
        assert done.returncode not in (0, None), done.stdout
        lines = [line for line in done.stderr.strip().splitlines() if line.strip() and " tok/s " not in line]
        assert len(lines) == 1, done.stderr
        return lines[0]

    def start(self, *args: str, ranks: int = 0) -> subprocess.Popen:
        """train.py in the background, its output in process.stdout; killed at the end of the test."""
        command = self.command("train.py", *args, ranks=ranks)
        self.started.append(subprocess.Popen(command, cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return self.started[-1]

    def tiny(self, arm: str, *more: str) -> list[str]:
        """Arguments of train.py for a tiny run of an arm."""
        return [f"config/{arm}_nano.py", *TINY, f"--expect_params={TINY_PARAMS[arm]}", *more]


def wait_for(process: subprocess.Popen, text: str, seconds: float = 240) -> None:
    """Read a process's output until a line holds the text."""
    end = time.monotonic() + seconds
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
        if time.monotonic() > end:
            break
    raise AssertionError(f"not said within {seconds} s: {text!r}, but\n{''.join(seen[-20:])}")
