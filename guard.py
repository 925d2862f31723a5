"""What is not the training loop itself: preflight of the data, the lock on a run's folder, signals, saving and loading, identity.

    python guard.py out/nano/L_s0/best.pt      # is this checkpoint whole, and what is in it
    python guard.py leftovers                  # is any train.py of this folder still running

Every refusal is one line (what is wrong, where, what to do) and a non-zero exit, raised as Refusal.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.attention import SDPBackend

HERE = Path(__file__).resolve().parent
CODE = ("model.py", "train.py", "guard.py")  # what decides a run's numbers, beside its config
PROBES, PROBE_LEN = 32, 1024  # stretches of val looked for in train
# On disk at rest, bytes a stored parameter: best.pt, final.pt, last/ and last.old/ (weights and Adam), and the best.pt that was there at each of those saves
RUN_BYTES = 4 + 4 + 12 + 12 + 4 + 4


class Refusal(SystemExit):
    """A run that must not start or go on: prints its one line and exits with 1."""


# ---- files ------------------------------------------------------------------------------------------------------------


def sha256_file(path: Path | str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def replace_file(path: Path | str, write) -> None:
    """Write a file whole or not at all: write(f) into a temporary file beside it, fsync, os.replace. The old one stands until then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def write_json(path: Path | str, obj: dict) -> None:
    """Atomic, numbers unrounded, a line a key and a line a row of a list of dicts, so that a diff of the record can be read."""

    def text(value) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(row, allow_nan=False) for row in value) + "\n ]"
        return json.dumps(value, allow_nan=False)

    body = ",\n ".join(f"{json.dumps(key)}: {text(value)}" for key, value in obj.items())
    replace_file(path, lambda f: f.write(("{\n " + body + "\n}\n").encode()))


def read_json(path: Path | str) -> dict:
    """A JSON object from a file; Refusal names a missing or broken one."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise Refusal(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise Refusal(f"{path}: not readable as JSON ({e})") from None


# ---- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(path: Path | str, obj: dict) -> str:
    """Write a best.pt or final.pt atomically; returns its sha256. Tensors and plain Python types only, so weights_only loads it."""
    replace_file(path, lambda f: torch.save(obj, f))
    return sha256_file(path)


def load_checkpoint(path: Path | str) -> dict:
    """Read a best.pt or final.pt onto the CPU, its CRCs checked first: torch.load alone accepts a flipped bit."""
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()
        if bad:
            raise Refusal(f"{path}: damaged (CRC of {bad} is wrong); use another checkpoint or train again")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Refusal(f"{path}: no such checkpoint; train.py writes best.pt and final.pt under out/") from None
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as e:
        raise Refusal(f"{path}: not a whole checkpoint ({str(e).splitlines()[0]}); use another or train again") from None


def save_last(folder: Path, state: dict, trainer: dict, need: int, rank: int, agree, gather) -> str:
    """Write the resume state to folder/last: each rank its part (torch.distributed.checkpoint), rank 0 the trainer's JSON and the digests.

    Written into last.tmp and renamed when whole; the state before stays as last.old, for the day that the newest is damaged. Returns ""
    or what failed, the same on every rank: agree(flag) is true where any rank's is, so that no rank waits for one that gave up.
    """
    last, tmp, old, digests = folder / "last", folder / "last.tmp", folder / "last.old", {}

    def room() -> None:
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
            if shutil.disk_usage(folder).free < need and last.exists():
                shutil.rmtree(old, ignore_errors=True)
            if (free := shutil.disk_usage(folder).free) < need:
                raise OSError(errno.ENOSPC, f"{free / 1e9:.3f} GB free under {folder}, {need / 1e9:.3f} GB needed")

    def write() -> None:
        dcp.save(state, checkpoint_id=str(tmp))
        digests.update({p.name: sha256_file(p) for p in tmp.glob(f"__{rank}_*")})

    def publish() -> None:
        if rank == 0:
            write_json(tmp / "trainer.json", trainer)
            if (folder / "best.pt").exists():
                with contextlib.suppress(OSError):  # a file system without hard links
                    os.link(folder / "best.pt", tmp / "best.pt")
            parts = {k: v for part in everyones for k, v in part.items()}
            write_json(tmp / "digests.json", parts | {name: sha256_file(tmp / name) for name in (".metadata", "trainer.json")})
            if last.exists():
                shutil.rmtree(old, ignore_errors=True)
                last.rename(old)
            tmp.rename(last)

    for phase in (room, write, publish):
        error = ""
        try:
            phase()
        except Exception as e:  # noqa: BLE001, a full or broken disk comes as many types; the caller decides
            error = f"{type(e).__name__}: {str(e).strip().splitlines()[-1] if str(e).strip() else ''}"
        if agree(bool(error)):
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            return error or "another rank could not write its part"
        everyones = gather(digests)
    return ""


def damage(state: Path) -> str:
    """What is wrong with a resume state, "" for nothing: every file is there and has the digest it was written with."""
    try:
        digests = json.loads((state / "digests.json").read_text())
        return next((f"{name} has changed since it was written" for name, sha in digests.items() if sha256_file(state / name) != sha), "")
    except (OSError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"


def restore_best(folder: Path, last: Path) -> None:
    """best.pt as it was when the resume state was saved: an eval after the save may have replaced it, and a resume need not find that eval's loss again."""
    kept, best = last / "best.pt", folder / "best.pt"
    if kept.exists() and not (best.exists() and best.samefile(kept)):
        os.link(kept, folder / ".best.pt.tmp")
        os.replace(folder / ".best.pt.tmp", best)


def clear_run(folder: Path) -> None:
    """Remove an earlier run's checkpoints when a run starts afresh: a later resume must not find them."""
    for name in ("last", "last.old", "last.tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("best.pt", "final.pt"):
        (folder / name).unlink(missing_ok=True)


def find_last(folder: Path) -> Path | None:
    """The newest whole resume state of a run, or None. A damaged one is named, and the one before it used; Refusal where all are damaged."""
    found = [state for state in (folder / "last", folder / "last.old") if state.exists()]
    for state in found:
        if not (problem := damage(state)):
            return state
        print(f"{state}: damaged ({problem}): not used", flush=True)
    if found:
        raise Refusal(f"{folder}: no whole resume state is left; move the folder away to start over")
    return None


# ---- identity ---------------------------------------------------------------------------------------------------------


def git(*args: str) -> str | None:
    run = subprocess.run(["git", "-C", str(HERE), *args], check=False, capture_output=True, text=True, errors="replace")
    return run.stdout if run.returncode == 0 else None


def code_identity(config: dict) -> dict:
    """What ran: sha256 over CODE, the same with the resolved config, and commit and diff where there is git."""
    code = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in CODE)).hexdigest()
    run = hashlib.sha256((code + json.dumps(config, sort_keys=True)).encode()).hexdigest()
    commit = git("rev-parse", "--verify", "--quiet", "HEAD") if (HERE / ".git").exists() and shutil.which("git") else None
    if not commit:
        return {"code_sha256": code, "run_sha256": run, "git_commit": None, "git_diff": None}
    diff = git("diff", "HEAD", "--", ".", ":!results", ":!evals")
    cut = f"\n[cut at 20,000 of {len(diff):,} characters]" if len(diff) > 20_000 else ""
    return {"code_sha256": code, "run_sha256": run, "git_commit": commit.strip(), "git_diff": diff[:20_000] + cut}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "platform": platform.platform()}


# ---- devices ----------------------------------------------------------------------------------------------------------


def device_identity(device: torch.device) -> dict:
    """Name and unique id of a rank's device; a CPU has no id, so that nothing can be claimed of it."""
    if device.type != "cuda":
        return {"name": device.type, "uuid": None}
    p = torch.cuda.get_device_properties(device)
    return {"name": p.name, "uuid": str(p.uuid)}


def attention_backend(cfg, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that scaled_dot_product_attention picks for this shape, by name, for the record."""
    q = torch.empty(1, cfg.n_head, cfg.window, cfg.n_embd // cfg.n_head, device=device, dtype=dtype, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name.lower()


def check_devices(devices: list[dict]) -> None:
    """Guard 2: as many distinct devices as ranks."""
    ids = [d["uuid"] for d in devices]
    if None not in ids and len(set(ids)) != len(ids):
        raise Refusal(f"{len(ids)} ranks share {len(set(ids))} GPUs ({', '.join(ids)}): one GPU a rank")


def nvidia_smi(gpu: str, query: str) -> str:
    """What nvidia-smi says of one GPU (index or uuid), "" where there is none."""
    gpu = gpu if gpu.isdigit() or gpu.startswith("GPU-") else f"GPU-{gpu}"
    try:
        return subprocess.run(["nvidia-smi", f"--id={gpu}", "--format=csv,noheader,nounits", query], check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def rank_stats(step_times: list[float], device: torch.device) -> dict:
    """What one rank did since the last row: step seconds (median, max), peak memory, and a GPU's utilisation and power."""
    stats = {"step_p50": float(np.median(step_times)), "step_max": max(step_times)} if step_times else {}
    if device.type == "cuda":
        stats["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
        percent, _, watts = nvidia_smi(str(torch.cuda.get_device_properties(device).uuid), "--query-gpu=utilization.gpu,power.draw").partition(", ")
        with contextlib.suppress(ValueError):  # a card that does not tell
            stats |= {"gpu_percent": float(percent), "watts": float(watts)}
    return stats


# ---- lock and signals -------------------------------------------------------------------------------------------------


def lock(folder: Path):
    """Hold a run's out folder against a second run; the kernel releases it when this process dies, however it dies."""
    folder.mkdir(parents=True, exist_ok=True)
    f = open(folder / "lock", "a+")  # noqa: SIM115, held open for as long as the lock is
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        f.seek(0)
        raise Refusal(f"{folder}: process {f.read().strip()} is already training here; wait for it, or end it") from None
    f.truncate(0)
    f.write(str(os.getpid()))
    f.flush()
    return f


class StopFlag:
    """SIGTERM and SIGINT set a flag only; the loop looks at it at each step's end. A second Ctrl-C leaves at once."""

    def __init__(self):
        self.signal = 0
        signal.signal(signal.SIGTERM, self.catch)
        signal.signal(signal.SIGINT, self.catch)

    def catch(self, number, frame) -> None:
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = number


def check_disk(folder: Path, need: int) -> None:
    """Room for what a run leaves at rest (RUN_BYTES)."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < need:
        raise Refusal(f"{folder}: {free / 1e9:.2f} GB free, a run of this size leaves {need / 1e9:.2f} GB there: make room first")


class Watchdog:
    """Ends a process whose loop has not moved for some minutes: a hung collective neither returns nor raises under NCCL."""

    def __init__(self, minutes: float, on_hang):
        self.seconds, self.on_hang, self.last = 60 * minutes, on_hang, time.monotonic()
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def watch(self) -> None:
        main = threading.main_thread().ident
        while (idle := time.monotonic() - self.last) < self.seconds:
            time.sleep(min(1.0, self.seconds - idle))
        self.on_hang("".join(traceback.format_stack(sys._current_frames()[main])))
        os._exit(1)


def ledger(line: str) -> None:
    """One line at the end of results/LEDGER.md, written whole."""
    path = HERE / "results" / "LEDGER.md"
    path.parent.mkdir(exist_ok=True)
    head = (
        "" if path.exists() else "# Every start, resume, preemption, failure and finish of a recorded run\n\n| time | run | event | step |\n| - | - | - | - |\n"
    )
    with open(path, "a") as f:
        f.write(head + line + "\n")


COPIES: list[subprocess.Popen] = []  # after_save's process, at most one


def after_save(command: str, name: str, last: bool = False) -> None:
    """Run a command in the background after a save, one at a time (the last one to its end); its failure is said and never fatal."""
    for turn in range(2 if last else 1):
        if COPIES:
            with contextlib.suppress(subprocess.TimeoutExpired):
                COPIES[0].wait(600 if last else 0)
            if COPIES[0].returncode is None:
                print(f"{name}  after_save is still at the save before: skipped this time", flush=True)
                return
            if COPIES[0].returncode:
                print(f"{name}  after_save failed with {COPIES[0].returncode}: {command}", flush=True)
        if turn == 0:
            COPIES[:] = [subprocess.Popen(command, shell=True, cwd=HERE, stdout=subprocess.DEVNULL, start_new_session=True)]


# ---- leftovers (guard 4) ----------------------------------------------------------------------------------------------


def leftovers() -> list[str]:
    """train.py processes of this folder that still run: "pid N: command line"."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(w.endswith("train.py") for w in words) and (proc / "cwd").resolve() == HERE and int(proc.name) != os.getpid():
                found.append(f"pid {proc.name}: {' '.join(words).strip()}")
    return found


def busy_gpu(index: int) -> str:
    """What else is on a GPU before our own context, "" for nothing: processes by pid, memory and command, or memory alone where a container hides them."""
    apps = nvidia_smi(str(index), "--query-compute-apps=pid,used_memory,name")
    if apps:
        return "; ".join(f"pid {pid}, {mib} MiB, {name}" for pid, mib, name in (line.split(", ", 2) for line in apps.splitlines()))
    used = nvidia_smi(str(index), "--query-gpu=memory.used")
    return f"{used} MiB in use by a process that cannot be seen from here" if used.isdigit() and int(used) > 1024 else ""


# ---- data preflight (guard 3) -----------------------------------------------------------------------------------------


def read_bin(path: Path) -> np.memmap:
    """A bin as a uint16 memmap; Refusal on a missing, empty or odd-length file."""
    if not path.exists():
        raise Refusal(f"{path}: no such file; make the data with prepare.py first (README: One run at a time; bash run.sh nano makes its own)")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise Refusal(f"{path}: {size} bytes is not a whole number of uint16 tokens; the file is truncated, prepare it again")
    return np.memmap(path, dtype="<u2", mode="r")


def open_data(folder: Path) -> tuple[dict, np.memmap, np.memmap]:
    """Manifest, train and val bins of a data folder, sizes checked against the manifest."""
    train, val = read_bin(folder / "train.bin"), read_bin(folder / "val.bin")
    manifest = read_json(folder / "manifest.json")
    try:
        for key, kind in {"vocab_size": int, "tokenizer": str, "zlib_ratio": float}.items():
            kind(manifest[key])
        sizes = {split: (manifest[split]["tokens"], manifest[split]["text_bytes"], manifest[split]["sha256"]) for split in ("train", "val")}
    except (KeyError, TypeError, ValueError) as e:
        raise Refusal(f"{folder}/manifest.json: not a manifest of prepare.py ({type(e).__name__}: {e}); prepare again") from None
    for split, data in (("train", train), ("val", val)):
        said = sizes[split][0]
        if said != len(data):
            raise Refusal(f"{folder}/{split}.bin holds {len(data):,} tokens, manifest.json says {said:,}: one of them is not the other's; prepare again")
    return manifest, train, val


def check_data(folder: Path, manifest: dict, train: np.ndarray, val: np.ndarray, vocab_size: int, window: int) -> None:
    """Refuse data that cannot answer the question, with the measured value and the limit. Reads both bins once."""
    for split, data in (("train", train), ("val", val)):
        if sha256_file(folder / f"{split}.bin") != manifest[split]["sha256"]:
            raise Refusal(f"{folder}/{split}.bin: sha256 differs from manifest.json: changed since it was prepared; prepare it again")
        if (top := int(data.max())) >= vocab_size:
            raise Refusal(f"{folder}/{split}.bin: token id {top} is outside the vocabulary of {vocab_size}; wrong tokenizer or wrong vocab_size")
    few = 1 << 28 if manifest["vocab_size"] == 2 else len(train)  # a search in bits is slow: everything looks alike
    limits = [("share of val stretches found in train", val_in_train(train[:few], val), "<=", 0.04)]  # one of 32 may be boilerplate
    ignore = ord(" ") if manifest["tokenizer"] == "byte" else None  # indentation: 5% of the standard library's 128-byte windows are half spaces
    if manifest["vocab_size"] > 2:  # bits are exempt: one of two tokens always fills half, and zlib sees eight to a byte
        limits += [
            ("share of the commonest token", commonest_share(train), "<=", 0.50),
            ("share of windows with over half one token", majority_share(train, window, ignore), "<=", 0.01),
            ("zlib ratio of the text", manifest["zlib_ratio"], ">=", 0.10),
        ]
    for what, measured, side, limit in limits:
        if measured > limit if side == "<=" else measured < limit:
            raise Refusal(f"{folder}/train.bin: {what} is {measured:.4f}, the limit is {side} {limit:.2f}: not data to train on; look at it, prepare other")


def commonest_share(data: np.ndarray, chunk: int = 1 << 22) -> float:
    """Share of the commonest token, by chunks so that memory does not grow with the corpus."""
    total = np.zeros(65536, dtype=np.int64)
    for i in range(0, len(data), chunk):
        total += np.bincount(data[i : i + chunk], minlength=65536)
    return float(total.max() / len(data))


def majority_share(data: np.ndarray, window: int, ignore: int | None = None, sample: int = 20_000) -> float:
    """Share of windows over half of which is one token (other than `ignore`), of at most `sample` evenly spaced ones."""
    n = len(data) // window
    if window < 3 or n == 0:
        return 0.0
    rows = np.linspace(0, n - 1, min(n, sample)).astype(np.int64)
    hits = 0
    for w in (data[r * window : (r + 1) * window] for r in rows):
        median = np.partition(w, window // 2)[window // 2]  # a token that fills over half is the median
        hits += median != ignore and np.count_nonzero(w == median) > window / 2
    return hits / len(rows)


def val_in_train(train: np.ndarray, val: np.ndarray, chunk: int = 1 << 24) -> float:
    """Share of PROBES stretches of val, PROBE_LEN tokens each, that stand somewhere in train (a copied document, or the wrong file)."""
    length = min(PROBE_LEN, len(val))
    starts = np.linspace(0, len(val) - length, PROBES).astype(np.int64)
    probes = [val[s : s + length].tobytes() for s in starts]
    found = [False] * len(probes)
    for i in range(0, len(train), chunk):
        text = train[i : i + chunk + length].tobytes()
        found = [f or p in text for f, p in zip(found, probes)]
    return sum(found) / len(probes)


def main() -> None:
    if sys.argv[1:] == ["leftovers"]:  # run.sh asks after each run
        if found := leftovers():
            ledger(f"| {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} | | left over: {'; '.join(found)} | |")
            raise Refusal("processes of an earlier run are still there; end them by pid: " + "; ".join(found))
        return
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    ckpt = load_checkpoint(sys.argv[1])
    if not isinstance(ckpt, dict) or not {"model", "config", "step"} <= ckpt.keys():
        raise Refusal(f"{sys.argv[1]}: not a checkpoint of this project (no model, config and step in it)")
    tensors = ckpt["model"].values()
    print(
        f"{sys.argv[1]}: whole, {sum(t.numel() for t in tensors):,} parameters, step {ckpt['step']}, val {ckpt['val_loss']:.4f} nats, sha256 {sha256_file(sys.argv[1])}"
    )


if __name__ == "__main__":
    main()
