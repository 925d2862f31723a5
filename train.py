"""Train one run: one process, or several under torchrun (DDP). Writes results/<rung>/<arm>_s<seed>.json and out/<rung>/<arm>_s<seed>/.

    python train.py config/L_nano.py                                        # on a CPU, minutes
    torchrun --nproc_per_node=8 train.py config/L_1b.py --seed=1            # on a node
    python train.py config/V_nano.py --n_loop=2 --tag=twice                 # an ablation: one line, one tag

A config is plain Python assignments to the fields of Config below; `base = "V_nano.py"` starts from another file. `--key=value`
overrides a field, a bare `--flag` is True. Anything that changes the result needs --tag=x, which writes <arm>_s<seed>_x.
"""

import ctypes
import os
import signal
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # beside a busy process the default spins, many times slower
if "TORCHELASTIC_RUN_ID" in os.environ:  # a worker dies with its torchrun, whatever killed that; before the slow import of torch
    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os._exit(1)

import contextlib
import dataclasses
import datetime
import difflib
import functools
import hashlib
import math
import re
import runpy
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import guard
from guard import Refusal
from model import Transformer, check_shape, default_eps

for notice in (".*broadcast_buffers.*", ".*assuming the intent is to save in a single process.*", ".*to load in a single process.*"):
    warnings.filterwarnings("ignore", message=notice)  # torch's about its own API; the tests hold what they are about

# ---- config -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    # the run
    arm: str = ""  # V, L, VE, L1, L3, L05: an arm of config/bars_<rung>.json
    rung: str = ""  # nano, flip, 400m, 1b
    seed: int = 0  # drives init and data order
    tag: str = ""  # names a run that is not the registered one: <arm>_s<seed>_<tag>
    folder: str = ""  # under results/, evals/ and out/; empty = the rung
    resume: str = "never"  # never, or auto: go on from out/.../last where there is one
    force_resume: bool = False  # go on although config, data or code have changed; recorded in events
    # model
    expect_params: int = 0  # stored parameters this config claims; train refuses on any other number
    vocab_size: int = 257  # rows of the embedding, >= the tokenizer's
    n_layer: int = 6  # stored blocks
    n_loop: int = 1  # applications of each block
    loop_order: str = "layer"  # layer: each block n_loop times in a row; stack: the whole stack n_loop times
    eps: float = 0.0  # residual scale; 0 = 1/(n_loop sqrt n_layer) where n_loop > 1, else 1
    n_embd: int = 64  # width of the residual stream
    n_head: int = 4  # attention heads, n_embd / n_head wide
    n_kv_head: int = 0  # heads of keys and values, a divisor of n_head; 0 = n_head
    ffn_hidden: int = 176  # SwiGLU hidden width
    window: int = 128  # tokens of context
    tied: bool = False  # head = embedding
    norm_eps: float = 1e-6  # RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    # data
    data: str = "data/nano"  # folder of train.bin, val.bin, manifest.json
    unique_tokens: int = 0  # train tokens of the data; must equal the manifest's
    val_tokens: int = 0  # held-out tokens; must equal the manifest's
    epochs: float = 5.0  # passes over the unique tokens; steps = round(length x epochs x windows / batch)
    length: float = 1.0  # share of the run: steps and warmup scaled alike, for the LR probe
    decay_epochs: float = 0.0  # the cosine ends here and the floor goes on, for --epochs=8; 0 = at epochs
    batch: int = 16  # windows a step, all ranks together
    micro_batch: int = 16  # windows a forward on one rank, at most
    max_steps: int = 0  # stop after this many steps, schedule unbent; 0 = all
    # optimizer
    lr: float = 6e-4  # peak
    warmup: int = 100  # steps, linear
    min_lr: float = 0.1  # floor of the cosine, share of lr
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-8  # AdamW
    weight_decay: float = 0.1  # on tensors of 2+ dimensions, embeddings too
    grad_clip: float = 1.0  # global norm
    # cadence
    eval_every: int = 250  # steps between evals of the whole val set, the same in all arms
    save_every: int = 1000  # steps between resume states; one is also written every 15 minutes
    after_save: str = ""  # a shell command started after each save, e.g. rsync off the node; its failure is said, never fatal
    log_every: int = 10  # steps between progress lines
    spike: float = 1.0  # a step's loss this many nats above the mean since the last eval is noted in events; 0 = off
    timeout_min: float = 20.0  # minutes without a step, an eval batch or a save after which a rank calls itself hung and ends
    allow_busy: bool = False  # start although other processes are on the GPUs
    # machine
    device: str = "auto"  # auto: cuda, mps, cpu in that order
    dtype: str = "auto"  # compute: float32 or bfloat16; auto = bfloat16 on cuda. Weights and loss are always fp32
    parallel: str = "ddp"  # over the ranks of torchrun: ddp (whole copies) or fsdp (each block's weights, gradients and Adam sharded)
    zero: int = 2  # fsdp: 2 keeps a block's weights gathered from its first use in a step to the update, 3 frees them after each use
    shard_ranks: int = 0  # fsdp: shard over groups of this many ranks, copies between the groups (one group a node, say); 0 = over all
    ckpt: str = "none"  # activations recomputed in backward: none; loop: of a block's applications after the first (layer order only); all: of every one
    loss_chunks: int = 1  # chunks of a micro-batch's tokens whose logits exist at a time; 1 = all at once
    compile: bool = False  # torch.compile each block
    wandb_project: str = ""  # mirror the rows there; empty = off

    @property
    def continues(self) -> bool:
        """Whether this is a registered run carried on at the floor of its schedule (--epochs=8)."""
        return self.decay_epochs > 0 and self.tag == f"e{self.epochs:g}"

    @property
    def name(self) -> str:
        return f"{self.arm}_s{self.seed}" + (f"_{self.tag}" if self.tag else "")

    def path(self, kind: str) -> Path:
        """results | evals | out -> that folder of this run's rung, beside the scripts."""
        return guard.HERE / kind / (self.folder or self.rung)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
# Overrides that need no tag: they leave the numbers alone, or name the run (lr: what the probe found; the audit compares it).
EXEMPT = {"seed", "tag", "folder", "resume", "data", "micro_batch", "lr", "save_every", "after_save", "log_every", "device", "wandb_project"}
EXEMPT |= {"force_resume", "spike", "timeout_min", "allow_busy", "parallel", "zero", "shard_ranks", "ckpt", "loss_chunks", "compile"}
CHOICES = {
    "resume": ("never", "auto"), "dtype": ("auto", "float32", "bfloat16"), "device": ("auto", "cuda", "mps", "cpu"),
    "parallel": ("ddp", "fsdp"), "zero": (2, 3), "ckpt": ("none", "loop", "all"),
}  # fmt: skip
POSITIVE = [
    "batch",
    "micro_batch",
    "loss_chunks",
    "eval_every",
    "save_every",
    "log_every",
    "epochs",
    "length",
    "lr",
    "unique_tokens",
    "val_tokens",
    "grad_clip",
    "timeout_min",
]
NOT_NEGATIVE = ["spike", "seed", "max_steps", "warmup", "weight_decay", "min_lr", "beta1", "beta2", "adam_eps", "shard_ranks", "decay_epochs", "n_kv_head"]
BELOW = {"seed": 2**32, "min_lr": 1 + 1e-9, "beta1": 1, "beta2": 1}
SAVE_SECONDS = 900  # a resume state at least this often
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}  # dense FLOP/s, NVIDIA data sheets; for MFU


def typed(key: str, value, where: str):
    """value as the type of Config.key, from text or from a config file; Refusal on an unknown key (with the nearest) or a wrong type."""
    if key not in FIELDS:
        near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0)[0]
        raise Refusal(f'{where}: unknown config key "{key}"; the nearest is "{near}" (train.py, class Config, lists all)')
    kind = FIELDS[key].type
    try:
        if isinstance(value, str) and kind is not str:
            value = {"True": True, "False": False}[value] if kind is bool else kind(value)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise ValueError
    except (ValueError, KeyError):
        raise Refusal(f"{where}: {key} = {value!r} is not {'True or False' if kind is bool else 'a ' + kind.__name__}") from None
    return value


def read_config_file(path: str) -> dict:
    """The assignments of a config file, those of its `base` first. Underscored names and imported modules are its own business."""
    if not Path(path).is_file():
        raise Refusal(f"{path}: no such config file; there are {', '.join(sorted(p.name for p in guard.HERE.glob('config/*.py')))} in config/")
    try:
        names = runpy.run_path(path)
    except Exception as e:  # noqa: BLE001, whatever is wrong in the user's file
        raise Refusal(f"{path}: {type(e).__name__}: {e}") from None
    base = names.pop("base", "")
    if not isinstance(base, str):
        raise Refusal(f"{path}: base = {base!r} is not the name of a config file")
    values = read_config_file(str(Path(path).parent / base)) if base else {}
    own = {k: v for k, v in names.items() if not k.startswith("_") and not callable(v) and type(v) is not type(os)}
    return values | {k: typed(k, v, path) for k, v in own.items()}


def load_config(args: list[str]) -> Config:
    """[config file, --key=value ...] -> Config with eps resolved, checked. Refusal in one line on anything wrong."""
    if not args or args[0].startswith("-"):
        raise Refusal(__doc__)
    values = read_config_file(args[0])
    overrides = {}
    for arg in args[1:]:
        if not re.fullmatch(r"--\w+(=.*)?", arg, re.DOTALL):
            raise Refusal(f'"{arg}": an override is written --key=value, or --flag for True')
        key, _, value = arg[2:].partition("=")
        if "=" not in arg and key in FIELDS and FIELDS[key].type is not bool:
            raise Refusal(f"{arg}: wants a value, written {arg}=...")
        overrides[key] = typed(key, value if "=" in arg else "True", "command line")
    changed = [k for k, v in overrides.items() if k not in EXEMPT and v != values.get(k, FIELDS[k].default)]
    cfg = Config(**values | overrides)
    cfg.eps = cfg.eps or default_eps(cfg.n_layer, max(1, cfg.n_loop))
    if changed == ["epochs"] and cfg.epochs > values["epochs"] and not cfg.tag:  # goes on from the registered run's last state
        cfg.tag, cfg.decay_epochs = f"e{cfg.epochs:g}", values["epochs"]
    if changed and not cfg.tag:
        raise Refusal(f"--{changed[0]} changes the result, and {cfg.name} names the registered run: add --tag=x (writes {cfg.name}_x)")
    if re.fullmatch(r"e\d.*", cfg.tag) and not cfg.continues:
        raise Refusal(f"--tag={cfg.tag}: e and a number names a continuation (--epochs=8 alone makes it); another tag")
    check_config(cfg, args[0])
    return cfg


def check_config(cfg: Config, where: str) -> None:
    try:
        check_shape(cfg)
    except ValueError as e:
        raise Refusal(f"{where}: {e}") from None
    for key, choices in CHOICES.items():
        if getattr(cfg, key) not in choices:
            raise Refusal(f"{where}: {key} = {getattr(cfg, key)!r} is not one of {', '.join(map(str, choices))}")
    for key in POSITIVE + NOT_NEGATIVE:
        value = getattr(cfg, key)
        if not (value > 0 or (value == 0 and key in NOT_NEGATIVE)) or value >= BELOW.get(key, math.inf):
            raise Refusal(f"{where}: {key} = {value} is out of range (train.py, class Config, says what it is)")
    for key, text in {"arm": cfg.arm, "rung": cfg.rung, "tag": cfg.tag or "x", "folder": cfg.folder or "x"}.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
            raise Refusal(f'{where}: {key} = "{text}" is no name (letters, digits, . - _)')


def check_registered(cfg: Config) -> str:
    """sha256 of the rung's bars file; Refusal if an untagged run is not what that file registers (an edited config, say)."""
    path = guard.HERE / "config" / f"bars_{cfg.rung}.json"
    bars = guard.read_json(path)
    if not cfg.tag:
        if cfg.arm not in bars["arms"]:
            raise Refusal(f"arm {cfg.arm} is not registered in {path.name} ({', '.join(bars['arms'])}): add --tag=something")
        for key, said in {**bars["config"], **bars["arms"][cfg.arm]}.items():
            mine = getattr(cfg, key)
            if key not in EXEMPT and not (math.isclose(mine, said, rel_tol=1e-9) if isinstance(said, float) else mine == said):
                raise Refusal(f"{cfg.name} names the registered run, and {path.name} says {key} = {said}, not {mine}: add --tag=x")
    return guard.sha256_file(path)


# ---- setup ------------------------------------------------------------------------------------------------------------

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def setup_device(cfg: Config) -> torch.device:
    """This rank's device; joins the process group under torchrun. TF32 stays off for what remains fp32."""
    kind = cfg.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    elif kind != "cpu" and not getattr(torch, kind).is_available():
        raise Refusal(f"--device={kind}: torch {torch.__version__} sees no such device here; try --device=auto")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(kind, LOCAL_RANK) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if LOCAL_RANK >= torch.cuda.device_count():
            raise Refusal(f"rank {RANK}: no GPU for it, there are {(n := torch.cuda.device_count())}; use --nproc_per_node={n}")
        torch.cuda.set_device(device)
    if WORLD > 1 and not dist.is_initialized():
        wait = datetime.timedelta(minutes=cfg.timeout_min + 1)  # the watchdog speaks first
        store = next(dist.rendezvous("env://"))[0]  # torchrun keeps one over its restarts: without a prefix ranks find the addresses of the dead
        store = dist.PrefixStore("restart " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=RANK, world_size=WORLD, timeout=wait)
    return device


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def gather(obj) -> list:
    """obj of every rank, on every rank."""
    out = [obj]
    if WORLD > 1:
        out = [None] * WORLD
        dist.all_gather_object(out, obj)
    return out


def reduced(value: float, device: torch.device, op=dist.ReduceOp.SUM) -> float:
    """A number summed (or op) over the ranks, in fp64."""
    if WORLD == 1:
        return value
    t = torch.tensor(value, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    dist.all_reduce(t, op)
    return t.item()


@contextlib.contextmanager
def timed(run: dict, what: str):
    """Add the seconds spent inside to run["sec"][what], so that evals and saves stay out of the training time."""
    start = time.perf_counter()
    yield
    run["sec"][what] += time.perf_counter() - start


def barrier() -> None:
    if WORLD > 1:
        dist.barrier()


# ---- data -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The permutation of n windows for one epoch of one seed. RandomState's stream is frozen by numpy, default_rng's is not."""
    return np.random.RandomState([seed, epoch]).permutation(n)


def batch_windows(seed: int, step: int, batch: int, n: int) -> np.ndarray:
    """Window ids of the global batch of a step, a pure function of (seed, step): nothing to save, the same at every world size.

    The stream is epoch 0's permutation, then epoch 1's, and so on; a batch may straddle two epochs.
    """
    at = np.arange(step * batch, (step + 1) * batch)
    return np.array([epoch_order(seed, int(i // n), n)[i % n] for i in at])


def n_windows(tokens: int, window: int) -> int:
    """Whole windows in a bin: the last one needs one token more, its last target."""
    return (tokens - 1) // window


def fetch(data: np.ndarray, ids: np.ndarray, window: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (len(ids), window) int64 of some windows; targets are the inputs shifted by one."""
    rows = torch.from_numpy(np.stack([data[i * window : (i + 1) * window + 1] for i in ids]).astype(np.int64))
    rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)
    return rows[:, :-1], rows[:, 1:]


def split_batch(cfg: Config) -> tuple[int, int]:
    """(micro-batch, accumulation) of each rank: the largest micro-batch <= cfg.micro_batch that divides its share of the batch."""
    if cfg.batch % WORLD:
        raise Refusal(f"batch = {cfg.batch} windows is not divisible by {WORLD} ranks")
    share = cfg.batch // WORLD
    micro = max(m for m in range(1, min(share, cfg.micro_batch) + 1) if share % m == 0)
    return micro, share // micro


def load_data(cfg: Config) -> tuple[dict, np.memmap, np.memmap]:
    """Manifest and bins, checked against the config on every rank and against guard 3 on the first."""
    folder = guard.HERE / cfg.data
    manifest, train, val = guard.open_data(folder)
    for split, want in (("train", cfg.unique_tokens), ("val", cfg.val_tokens)):
        if manifest[split]["tokens"] != want:
            raise Refusal(f"{folder}: {manifest[split]['tokens']:,} {split} tokens, the config wants exactly {want:,}")
        if n_windows(want, cfg.window) < 1:
            raise Refusal(f"{folder}: {want:,} {split} tokens hold no window of {cfg.window} tokens + 1; shorten window or prepare more")
    if n_windows(cfg.unique_tokens, cfg.window) * cfg.epochs < cfg.batch:
        raise Refusal(f"{cfg.epochs} epochs of {n_windows(cfg.unique_tokens, cfg.window)} windows are less than one batch of {cfg.batch}")
    if RANK == 0:
        guard.check_data(folder, manifest, train, val, cfg.vocab_size, cfg.window)
    return manifest, train, val


# ---- model ------------------------------------------------------------------------------------------------------------


def build_model(cfg: Config, device: torch.device) -> Transformer:
    """The initialised model on its device, its size held against the config's claim (guard 1)."""
    with torch.device("meta"):
        stored = Transformer(cfg).counts()["stored"]
    if stored != cfg.expect_params:
        raise Refusal(f"this config makes {stored:,} parameters and claims expect_params = {cfg.expect_params:,}: correct one of them")
    sharded = cfg.parallel == "fsdp" and WORLD > 1
    whole = None
    if RANK == 0 or not sharded:  # drawn on the CPU before any sharding, so that every world size starts equal
        whole = Transformer(cfg)
        whole.init_weights(cfg.seed)
    if not sharded:
        return compile_blocks(whole.to(device), cfg)
    with torch.device("meta"):
        model = compile_blocks(Transformer(cfg), cfg)
    shard(model, cfg, device)
    model.to_empty(device=device)
    model.make_rope(device)
    options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sd.set_model_state_dict(model, whole.state_dict() if RANK == 0 else {}, options=options)
    return model


def compile_blocks(model: Transformer, cfg: Config) -> Transformer:
    """Compile each block's forward: inside it the activation checkpoints, around it FSDP's hooks. Parameters keep their plain names."""
    if cfg.compile:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # an error, not a silent fall to eager
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
    return model


def shard(model: Transformer, cfg: Config, device: torch.device) -> None:
    """FSDP2 on each stored block, then on the root (embedding, last norm, head). Gathered and reduced in fp32; autocast computes."""
    groups = cfg.shard_ranks or WORLD
    if WORLD % groups:
        raise Refusal(f"shard_ranks = {cfg.shard_ranks} does not divide {WORLD} ranks")
    if groups == WORLD:
        mesh = init_device_mesh(device.type, (WORLD,))
    else:
        mesh = init_device_mesh(device.type, (WORLD // groups, groups), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=cfg.zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if cfg.zero == 2:  # one gather a stored block a step: kept over the micro-batches, freed by train_step before the update
        model.set_reshard_after_backward(False)


def reshard(model: torch.nn.Module) -> None:
    """Give up the gathered weights of every FSDP unit. Forgetting this before an update trains on stale ones."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def sync_gradients(model: torch.nn.Module, now: bool):
    """Reduce this micro-batch's gradients over the ranks, or only add them up on each: a context manager around forward and backward."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if now or WORLD == 1 else model.no_sync()


def compute_dtype(cfg: Config, device: torch.device) -> torch.dtype:
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)


def autocast(device: torch.device, dtype: torch.dtype):
    """bf16 compute over fp32 weights. No cache of cast weights: it would sum the gradients of a weight's several uses in bf16, and only L has several."""
    return torch.autocast(device.type, dtype, cache_enabled=False) if dtype is not torch.float32 else contextlib.nullcontext()


# ---- optimizer --------------------------------------------------------------------------------------------------------


def build_optimizer(cfg: Config, model: torch.nn.Module) -> torch.optim.AdamW:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=params[0].device.type in ("cpu", "cuda"))


def total_steps(cfg: Config, epochs: float = 0.0) -> int:
    """Updates in so many epochs (0: the config's)."""
    return round(cfg.length * (epochs or cfg.epochs) * n_windows(cfg.unique_tokens, cfg.window) / cfg.batch)


def lr_at(cfg: Config, step: int) -> float:
    """Learning rate of update `step` (from 0): linear warmup, cosine to min_lr x lr at the last step, flat after it."""
    warmup, end = round(cfg.length * cfg.warmup), total_steps(cfg, cfg.decay_epochs)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, end - 1 - warmup))
    return cfg.lr * (cfg.min_lr + (1 - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


# ---- checkpoint -------------------------------------------------------------------------------------------------------


def save_weights(run: dict, kind: str, model: torch.nn.Module, cfg: Config, val: float) -> None:
    """Write best.pt or final.pt and enter it under run[kind]. Plain tensors and types: torch.load(weights_only=True) reads it."""
    weights = sd.get_model_state_dict(model, options=sd.StateDictOptions(full_state_dict=True, cpu_offload=True))  # fp32, plain names
    state = {"model": weights, "config": run["config"], "step": run["step"], "val_loss": val}
    sha, problem = None, ""
    for _ in range(2 if RANK == 0 else 0):
        try:
            sha, problem = guard.save_checkpoint(cfg.path("out") / cfg.name / f"{kind}.pt", state), ""
            break
        except (OSError, RuntimeError) as e:  # a full disk is either, as torch writes
            problem = f"{kind}.pt could not be written ({str(e).splitlines()[0]})"
    problem = gather(problem)[0]
    if problem and not run[kind]:
        raise Refusal(f"step {run['step']}: {problem} and none stands; make room and start again with --resume=auto")
    if problem:  # an older best.pt stands; the audit will see that it is not the lowest val loss
        event(run, cfg, problem)
        return say(f"{cfg.name}  step {run['step']}: {problem}")
    run[kind] = {"step": run["step"], "val_loss": val, "sha256": sha}


def save_last(run: dict, model: torch.nn.Module, opt: torch.optim.Optimizer, cfg: Config) -> None:
    """The resume state: tensors by rank, and the record so far, which is all that the loop needs beside them."""
    m, o = sd.get_state_dict(model, opt)
    folder, device = cfg.path("out") / cfg.name, next(model.parameters()).device
    agree = lambda flag: reduced(float(flag), device, dist.ReduceOp.MAX) > 0
    for _ in range(2):
        problem = guard.save_last(folder, {"model": m, "optim": o}, run, 13 * run["params"], RANK, agree, gather)
        if not problem:
            break
        event(run, cfg, f"save failed: {problem}")
        say(f"{cfg.name}  step {run['step']}: save failed: {problem}")
    if problem and agree(RANK == 0 and not ((folder / "last").exists() or (folder / "last.old").exists())):
        raise Refusal(f"{folder}: no resume state could be written ({problem}) and none stands; make room and start again")
    if RANK == 0 and cfg.after_save:
        guard.after_save(cfg.after_save, cfg.name)


def load_last(folder: Path, model: torch.nn.Module, opt: torch.optim.Optimizer) -> None:
    m, o = sd.get_state_dict(model, opt)
    state = {"model": m, "optim": o}
    try:
        dcp.load(state, checkpoint_id=str(folder))
    except Exception as e:  # noqa: BLE001, a damaged part raises whatever pickle or the file system does
        raise Refusal(f"{folder}: cannot be read ({type(e).__name__}: {str(e).splitlines()[-1][:100]}); move {folder.parent} away to start over") from None
    sd.set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])


def newest(folder: Path) -> Path | None:
    """The newest whole resume state, found by the first rank for all."""
    return gather(guard.find_last(folder) if RANK == 0 else None)[0]


def leave_if_done(cfg: Config) -> None:
    """A finished run is left alone, before anything large is read."""
    path = cfg.path("results") / f"{cfg.name}.json"
    old = guard.read_json(path) if cfg.resume == "auto" and path.exists() else {}
    if old.get("status") == "done":
        same = old["code"]["code_sha256"] == guard.code_identity({})["code_sha256"]
        stale = "" if same else f", by other code than is here now: delete it and {(cfg.path('out') / cfg.name).relative_to(guard.HERE)} to train anew"
        say(f"{path.relative_to(guard.HERE)}: done already{stale}")
        leave(0)


def start_or_resume(cfg: Config, fresh: dict) -> tuple[dict, Path | None]:
    """(the run's record, the state to load or None). Never overwrites a registered run; a tagged one is scratch and starts over."""
    path, out = cfg.path("results") / f"{cfg.name}.json", cfg.path("out")
    old, last = guard.read_json(path) if path.exists() else {}, newest(out / cfg.name)
    if cfg.resume == "never":
        if not cfg.tag and (old or last):
            raise Refusal(f"{path}: this run is {old.get('status', 'half done')}; --resume=auto goes on with it, --tag=x or --folder=x makes another")
        last = None
    if last is None and cfg.continues:
        last = newest(out / f"{cfg.arm}_s{cfg.seed}")
        if last is None or guard.read_json(last / "trainer.json")["status"] != "done":
            raise Refusal(f"{out / cfg.arm}_s{cfg.seed}/last: no state of the finished run to go on from; train it first")
    if last is None:
        return fresh | {"events": old.get("events", [])}, None
    return resumed(guard.read_json(last / "trainer.json"), old, cfg, fresh, last), last


def resumed(run: dict, old: dict, cfg: Config, fresh: dict, last: Path) -> dict:
    """The saved record, as this start goes on with it. Refuses, by name and both values, to go on with another run, code or data."""
    diffs = [(k, run[k], fresh[k]) for k in ("params", "data", "order_sha256", "bars_sha256", "dtype")]
    diffs += [("the code (sha256 of model.py, train.py, guard.py)", run["code"]["code_sha256"], fresh["code"]["code_sha256"])]
    loose = EXEMPT - {"lr"} | ({"epochs", "decay_epochs"} if cfg.continues else set())
    diffs += [(k, run["config"][k], fresh["config"][k]) for k in FIELDS if k not in loose]
    diffs = [f"{key} was {was} and is {now}" for key, was, now in diffs if was != now]
    if diffs and not cfg.force_resume:
        raise Refusal(f"{last}: cannot resume, {'; '.join(diffs)}; put it back, move {last.parent} away to start over, or --force_resume (recorded)")
    changes = [f"forced: {d}" for d in diffs]
    changes += [f"torch {run['versions']['torch']} -> {v}" for v in [fresh["versions"]["torch"]] if v != run["versions"]["torch"]]
    changes += [f"{n} -> {m}" for n, m in [(run["devices"][0]["name"], fresh["devices"][0]["name"])] if n != m]
    now = {
        k: fresh[k]
        for k in ("config", "name", "tag", "steps", "devices", "world_size", "parallel", "micro_batch", "accum", "ckpt", "attention", "code", "versions")
    }
    if run["name"] != cfg.name:  # a continuation has its own best and final
        now |= {"best": None, "final": None, "final_val": None}
    if old.get("status") == "running":
        changes.append(f"found dead at step {old['step']} or later")
    run |= now | {"events": old.get("events", run["events"])}
    for change in changes:
        event(run, cfg, change)
    return run


# ---- eval -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: torch.nn.Module, val: np.ndarray, cfg: Config, device: torch.device, dtype: torch.dtype, beat=lambda: 0) -> float:
    """Mean loss in nats a token over every full window of val, split over the ranks, summed in fp64. beat() is called now and then;
    its first answer that is not 0 (a signal, the same on every rank) ends the eval with NaN."""
    n, (micro, _) = n_windows(len(val), cfg.window), split_batch(cfg)
    mine, total = np.arange(n)[RANK::WORLD], 0.0
    for i in range(0, math.ceil(n / WORLD), micro):  # as many forwards of one shape on every rank: FSDP gathers in each, compile knows no other
        if i // micro % 16 == 0 and beat():
            return math.nan
        ids = mine[i : i + micro]
        x, y = fetch(val, np.pad(ids, (0, micro - len(ids))), cfg.window, device)
        with autocast(device, dtype):
            losses = model(x, y, "none")[: len(ids)]
        total += losses.cpu().double().sum().item()
    reshard(model)
    return reduced(total, device) / (n * cfg.window)


@torch.no_grad()
def stream_rms(model: torch.nn.Module, val: np.ndarray, cfg: Config, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Root mean square of the residual stream after the embedding and after each block (in stack order after each of its turns), on the
    first windows of val, by hooks for one forward."""
    inner, seen = model.module if isinstance(model, DistributedDataParallel) else model, []
    note = lambda module, args, out: seen.append(out.float().square().mean().sqrt().item())
    hooks = [m.register_forward_hook(note) for m in (inner.embed, *inner.blocks)]
    n, micro = n_windows(len(val), cfg.window), split_batch(cfg)[0]
    with autocast(device, dtype):
        model(*fetch(val, np.arange(micro) % n, cfg.window, device), "none")
    for hook in hooks:
        hook.remove()
    reshard(model)
    return seen


# ---- record -----------------------------------------------------------------------------------------------------------


NOTHING_YET = {"loss_sum": 0.0, "gnorm": None, "clipped": 0, "steps": 0, "sec": 0.0}  # since the last row of the curve


def new_record(cfg: Config, model: Transformer, manifest: dict, bars_sha256: str, device: torch.device, dtype: torch.dtype) -> dict:
    """A results file before its first step; README, "what each key proves", describes the keys."""
    config, (micro, accum), n = dataclasses.asdict(cfg), split_batch(cfg), n_windows(cfg.unique_tokens, cfg.window)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return {
        "arm": cfg.arm, "seed": cfg.seed, "params": model.counts()["stored"], "config": config, "curve": [], "final_val": None, "wall_sec": 0.0,
        "name": cfg.name, "rung": cfg.rung, "tag": cfg.tag, "status": "running", "traceback": None, "step": 0, "steps": total_steps(cfg),
        "best": None, "final": None, "counts": model.counts(), "flops_per_token": model.flops_per_token(),
        "data": {"windows": n, "unique_tokens": cfg.unique_tokens, "val_tokens": cfg.val_tokens, "train_sha256": manifest["train"]["sha256"], "val_sha256": manifest["val"]["sha256"]},
        "order_sha256": hashlib.sha256(epoch_order(cfg.seed, 0, n).astype("<i8").tobytes()).hexdigest(), "bars_sha256": bars_sha256,
        "world_size": WORLD, "devices": gather({**guard.device_identity(device), "params_held": held}), "parallel": cfg.parallel if WORLD > 1 else "single", "ckpt": cfg.ckpt,
        "micro_batch": micro, "accum": accum, "dtype": str(dtype).removeprefix("torch."), "attention": guard.attention_backend(cfg, device, dtype),
        "sec": {"train": 0.0, "eval": 0.0, "save": 0.0}, "since_row": dict(NOTHING_YET),
        "code": guard.code_identity(config), "versions": guard.versions(), "events": [],
    }  # fmt: skip


def write_record(run: dict, cfg: Config) -> None:
    run["wall_sec"] = sum(run["sec"].values())
    if RANK == 0:
        guard.write_json(cfg.path("results") / f"{cfg.name}.json", run)


def event(run: dict, cfg: Config, what: str, rank: int = 0) -> None:
    """Note an event in the record and, for a recorded run, in results/LEDGER.md; on one rank only."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run["events"].append({"time": now, "event": what, "step": run["step"]})
    if RANK == rank and not cfg.tag and cfg.folder in ("", cfg.rung):
        guard.ledger(f"| {now} | {cfg.rung} {cfg.name} | {what} | {run['step']} |")


def record_failure(run: dict, cfg: Config, error: BaseException | str) -> None:
    """Status and traceback (or the stack of a hang) into the results file, by whichever rank failed first and without collectives, which could hang."""
    path = cfg.path("results") / f"{cfg.name}.json"
    if path.exists() and guard.read_json(path)["status"] == "failed":
        return
    text = error if isinstance(error, str) else str(error) if isinstance(error, Refusal) else "".join(traceback.format_exception(error))
    event(run, cfg, f"failed on rank {RANK}: {text.strip().splitlines()[-1][:200]}", RANK)
    guard.write_json(path, {**run, "status": "failed", "traceback": f"rank {RANK}, step {run['step']}: {text}"})


def add_row(run: dict, cfg: Config, val: float, rms: list[float], peak: float | None, ranks: list[dict]) -> dict:
    """One row of the curve, at run["step"] updates done. train_loss is the mean over the steps since the row before (null at 0)."""
    since, step = run["since_row"], run["step"]
    rate = since["steps"] * cfg.batch * cfg.window / since["sec"] if since["sec"] else None
    row = {
        "step": step, "tokens": step * cfg.batch * cfg.window, "train_loss": since["loss_sum"] / since["steps"] if since["steps"] else None,
        "val_loss": val, "gnorm": since["gnorm"], "clipped": since["clipped"] / since["steps"] if since["steps"] else None, "rms": rms, "sec": run["sec"]["train"], "epoch": step * cfg.batch / run["data"]["windows"],
        "lr": lr_at(cfg, max(0, step - 1)), "tokens_per_sec": rate, "mfu": rate * run["flops_per_token"] / peak if rate and peak else None,
        "eval_sec": run["sec"]["eval"], "save_sec": run["sec"]["save"], "ranks": ranks,
    }  # fmt: skip
    run["curve"].append(row)
    since |= NOTHING_YET
    return row


def start_wandb(cfg: Config, run: dict):
    """wandb's log function, or one that does nothing."""
    if RANK != 0 or not cfg.wandb_project:
        return lambda row: None
    try:
        import wandb
    except ImportError:
        raise Refusal(f"--wandb_project={cfg.wandb_project}: wandb is not installed (pip install wandb), or leave it empty") from None
    run_id = f"{cfg.folder or cfg.rung}-{cfg.name}"
    wandb.init(project=cfg.wandb_project, name=cfg.name, group=cfg.rung, config=run["config"], id=run_id, resume="allow")
    return lambda row: wandb.log({k: v for k, v in row.items() if k != "ranks"}, step=row["step"])


# ---- loop -------------------------------------------------------------------------------------------------------------


def train_step(model, opt, train, cfg: Config, step: int, accum: int, device, dtype) -> tuple[float, float]:
    """One update; returns (loss, gradient norm) of the global batch. Nothing is updated if either is not finite."""
    windows = batch_windows(cfg.seed, step, cfg.batch, n_windows(len(train), cfg.window))
    share = len(windows) // WORLD
    mine = windows[RANK * share : (RANK + 1) * share].reshape(accum, -1)  # this rank's rows, a micro-batch each
    for group in opt.param_groups:
        group["lr"] = lr_at(cfg, step)
    loss = torch.zeros((), device=device)
    for i, ids in enumerate(mine):
        x, y = fetch(train, ids, cfg.window, device)
        with sync_gradients(model, now=i == accum - 1 or cfg.zero == 3):
            with autocast(device, dtype):
                part = model(x, y) / accum
            part.backward()
        loss += part.detach()
    reshard(model)
    gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
    gnorm = (gnorm.full_tensor() if isinstance(gnorm, DTensor) else gnorm).item()
    loss = reduced(loss.item(), device) / WORLD
    if not (math.isfinite(loss) and math.isfinite(gnorm) and gnorm > 0):
        raise Refusal(f"step {step}: loss {loss}, gradient norm {gnorm}: stopped before the update, the last saved state stands; windows {windows.tolist()}")
    if step == 0 and not math.log(cfg.vocab_size) - 0.2 <= loss <= math.log(cfg.vocab_size) + 1.0:
        raise Refusal(f"first loss {loss:.4f} is outside [ln V - 0.2, ln V + 1.0] = {math.log(cfg.vocab_size):.4f} -0.2 +1.0: init or data is wrong")
    opt.step()
    opt.zero_grad(set_to_none=True)
    return loss, gnorm


def progress(run: dict, cfg: Config, loss: float, gnorm: float, recent: list[float], peak: float | None, end: int) -> str:
    """The line a reader watches; recent = the last steps' seconds. The ETA counts the evals to come."""
    step, rate = run["step"], len(recent) * cfg.batch * cfg.window / sum(recent)
    left = int((end - step) * sum(recent) / len(recent) + run["sec"]["eval"] / max(1, len(run["curve"])) * ((end - step) // cfg.eval_every + 1))
    mfu = f"MFU {rate * run['flops_per_token'] / peak:4.1%}  " if peak else ""
    eta = f"{left // 3600}h{left % 3600 // 60:02}m" if left >= 3600 else f"{left // 60}m{left % 60:02}s"
    return (
        f"{cfg.name}  step {step:>{len(str(end))}}/{end} {step / end:4.0%}  epoch {step * cfg.batch / run['data']['windows']:5.2f}/{cfg.epochs:g}"
        f"  loss {loss:.4f}  gnorm {gnorm:.2f}  lr {lr_at(cfg, step - 1):.2e}  {rate:,.0f} tok/s  {mfu}ETA {eta}"
    )


def eval_and_record(run, model, val, cfg, device, dtype, peak, step_times, log, beat) -> None:
    """A row of the curve, and best.pt where it is the lowest val loss so far."""
    with timed(run, "eval"):
        loss = evaluate(model, val, cfg, device, dtype, beat)
        if math.isnan(loss) and beat():  # a signal: this eval is made again after the resume
            return
        rms = stream_rms(model, val, cfg, device, dtype)
    if not math.isfinite(loss):
        raise Refusal(f"step {run['step']}: val loss {loss}: stopped, the last saved state stands")
    row = add_row(run, cfg, loss, rms, peak, gather(guard.rank_stats(step_times, device)))
    step_times.clear()
    best = run["best"] is None or loss < run["best"]["val_loss"]
    if best:
        with timed(run, "save"):
            save_weights(run, "best", model, cfg, loss)
    say(f"{cfg.name}  step {run['step']}  val {loss:.4f}{'  best so far' if best else ''}")
    write_record(run, cfg)
    log(row)


def train_loop(run, model, opt, train, val, cfg, device, dtype, log, stop) -> int:
    """From run["step"] to the end; returns 0, or the signal that stopped it. All that a resume needs is in run, model and opt."""
    end = min(cfg.max_steps or run["steps"], run["steps"])
    peak = next((v * WORLD for k, v in PEAK_BF16.items() if k in run["devices"][0]["name"]), None)
    saved, step_times, since = time.perf_counter(), [], run["since_row"]
    watchdog = guard.Watchdog(cfg.timeout_min, lambda stack: record_failure(run, cfg, f"nothing moved for {cfg.timeout_min:g} minutes, in\n{stack}"))

    def beat() -> int:
        """Tell the watchdog that the loop moves; the signal that any rank has been sent, or 0: one of them may have been told alone."""
        watchdog.beat()
        return int(reduced(stop.signal, device, dist.ReduceOp.MAX))

    while True:
        step = run["step"]
        if (step % cfg.eval_every == 0 or step == end) and not (run["curve"] and run["curve"][-1]["step"] == step):
            eval_and_record(run, model, val, cfg, device, dtype, peak, step_times, log, beat)
        if signalled := beat():
            with timed(run, "save"):
                save_last(run, model, opt, cfg)
            return signalled
        if step == end:
            return 0
        before = run["sec"]["train"]
        with timed(run, "train"):
            loss, gnorm = train_step(model, opt, train, cfg, step, run["accum"], device, dtype)
        step_times.append(run["sec"]["train"] - before)
        run["step"] = step + 1
        if cfg.spike and since["steps"] >= 10 and loss - since["loss_sum"] / since["steps"] > cfg.spike:
            event(run, cfg, f"spike: loss {loss:.4f}, {since['loss_sum'] / since['steps']:.4f} in the mean before")
        since |= {"loss_sum": since["loss_sum"] + loss, "gnorm": gnorm, "clipped": since["clipped"] + (gnorm > cfg.grad_clip)}
        since |= {"steps": since["steps"] + 1, "sec": since["sec"] + step_times[-1]}
        if run["step"] % cfg.log_every == 0:
            say(progress(run, cfg, loss, gnorm, step_times[-cfg.log_every :], peak, end))
        due = reduced(time.perf_counter() - saved, device, dist.ReduceOp.MAX) > SAVE_SECONDS
        if due or run["step"] % cfg.save_every == 0:
            with timed(run, "save"):
                save_last(run, model, opt, cfg)
            saved = time.perf_counter()
            watchdog.beat()


def finish(run, model, opt, cfg) -> None:
    """final.pt, the last resume state (a continuation starts from it), status done."""
    run["final_val"] = run["curve"][-1]["val_loss"]
    run["status"] = "done"
    event(run, cfg, "done")
    with timed(run, "save"):
        save_weights(run, "final", model, cfg, run["final_val"])
        save_last(run, model, opt, cfg)
    write_record(run, cfg)
    if RANK == 0 and cfg.after_save:
        guard.after_save(cfg.after_save, cfg.name, last=True)
    sec = ", ".join(f"{run['sec'][k]:.0f} s {word}" for k, word in (("train", "training"), ("eval", "evals"), ("save", "saves")))
    say(f"{cfg.name}  done: best val {run['best']['val_loss']:.4f} at step {run['best']['step']}, final {run['final_val']:.4f}; {sec}")


def main(args: list[str]) -> None:
    cfg = load_config(args)
    bars_sha256 = check_registered(cfg)
    leave_if_done(cfg)
    if not cfg.allow_busy and cfg.device in ("auto", "cuda") and (busy := guard.busy_gpu(LOCAL_RANK)):
        raise Refusal(f"GPU {LOCAL_RANK} is not free: {busy}; end it by pid, or --allow_busy")
    device, stop = setup_device(cfg), guard.StopFlag()
    manifest, train, val = load_data(cfg)
    model = build_model(cfg, device)
    held = guard.lock(cfg.path("out") / cfg.name) if RANK == 0 else None  # noqa: F841, released when this process ends
    dtype = compute_dtype(cfg, device)
    run, last = start_or_resume(cfg, new_record(cfg, model, manifest, bars_sha256, device, dtype))
    guard.check_devices(run["devices"])
    guard.check_disk(cfg.path("out"), 0 if last else guard.RUN_BYTES * run["params"])
    opt = build_optimizer(cfg, model)
    if WORLD > 1 and cfg.parallel == "ddp":
        model = DistributedDataParallel(
            model, device_ids=[LOCAL_RANK] if device.type == "cuda" else None, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    barrier()  # every rank has looked at the files that the first is about to change
    if RANK == 0 and (last is None or last.parent.name != cfg.name):
        guard.clear_run(cfg.path("out") / cfg.name)
    if last:
        load_last(last, model, opt)
    if RANK == 0 and last and last.parent.name == cfg.name:
        guard.restore_best(last.parent, last)
    log = start_wandb(cfg, run)
    run["status"] = "running"
    where = f"{run['accum']} x {run['micro_batch']} windows on each of {WORLD} {run['devices'][0]['name']}, {run['parallel']}, {run['dtype']}, ckpt {cfg.ckpt}"
    event(run, cfg, f"{'resumed' if last else 'started'}: {where}")
    say(f"{cfg.name}  {'resumed' if last else 'started'} at step {run['step']} of {run['steps']}: {run['params']:,} parameters, {where}")
    write_record(run, cfg)
    try:
        stopped = train_loop(run, model, opt, train, val, cfg, device, dtype, log, stop)
        if stopped:
            run["status"] = "preempted"
            event(run, cfg, f"preempted by signal {stopped}")
            write_record(run, cfg)
            say(f"{cfg.name}  stopped by signal {stopped} at step {run['step']}, state saved; the same command with --resume=auto goes on")
        else:
            finish(run, model, opt, cfg)
    except BaseException as e:
        record_failure(run, cfg, e)
        if WORLD > 1:
            print(e if isinstance(e, Refusal) else "".join(traceback.format_exception(e)), file=sys.stderr)
            leave(1, clean=False)
        raise
    leave(128 + stopped if stopped else 0)


def leave(code: int, clean: bool = True) -> None:
    """End this rank; among several without the interpreter's own clean-up, in which DDP's reducer can wait for a gloo thread that waits for the GIL."""
    if WORLD == 1:
        sys.exit(code)
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    if clean and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
