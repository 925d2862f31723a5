"""Size, memory, hours and cost of a rung before a node is rented. One process, no GPU, seconds.

    python plan.py config/V_1b.py config/L_1b.py --gpus=8xH100                     # both arms, the setting that fits both, the whole bill
    python plan.py config/L_1b.py --gpus=2x8xH100 --price=2.5 --mfu=0.35 --runs=2  # one job over two nodes
    python plan.py --table                                                         # the README's rows, in Markdown

Counts and FLOPs come from model.py, the schedule from train.py. Memory is a formula (moments() below) of eager training under autocast,
held against torch's own tracker in tests/test_plan.py; compiled blocks should keep less, which no GPU has measured yet. Hours are
model FLOPs / (GPUs x peak x MFU): recomputation is not counted as useful, so it shows as a lower MFU, not as more hours here.
"""

import argparse
import dataclasses
import math
import re
import sys

import torch

import guard
import train
from guard import Refusal
from model import Transformer
from train import PEAK_BF16, Config, load_config, n_windows, total_steps

# Memory in GB of NVIDIA's data sheets (H100 SXM, H200 SXM, A100 80GB SXM, L40S), taken as 10^9 bytes: a little under what the driver
# reports. Dense bf16 peaks are train.PEAK_BF16, from the same sheets (those print the H100's, H200's with sparsity: half counts).
GPU_GB = {"H100": 80, "H200": 141, "A100-80G": 80, "L40S": 48}
HEADROOM = 0.10  # of the GPU, for the CUDA context, NCCL's buffers and the allocator's fragments
NORM_SAVES = 0  # bytes a token and unit of width that RMSNorm keeps beside its input: the fused CUDA kernel none (the CPU's 4: tests/test_plan.py)
TOKENIZED = 1.9e6  # tokens/s of tiktoken's gpt2 on one thread, measured
DISK = 1e9  # bytes/s a checkpoint is written at: assumed
SUITE_TOKENS = 10e6  # of the eight zero-shot sets, each option with its context: assumed, rounded up
PROBE = 3 * 0.05  # runs: three learning rates at 5% length
ROWS = [  # of --table: rung, GPUs, assumed $ a GPU-hour
    ("1b", "8xH100", 2.0), ("1b", "2x8xH100", 2.0), ("1b", "8xA100-80G", 1.3), ("400m", "2xA100-80G", 1.3), ("400m", "1xL40S", 0.8),
]  # fmt: skip
GIB, GB = 2**30, 1e9


@dataclasses.dataclass(frozen=True)
class Gpus:
    """Some GPUs of one kind that one job runs on: the text of --gpus, how many, bytes of each, dense bf16 FLOP/s of each."""

    text: str
    count: int
    memory: float
    peak: float

    @property
    def usable(self) -> float:
        return self.memory * (1 - HEADROOM)


def parse_gpus(text: str) -> Gpus:
    """8xH100, or nodes first: 2x8xH100. Refusal on anything else, with the known names."""
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z].*)", text)
    if not found or found[3] not in GPU_GB:
        raise Refusal(f'--gpus={text}: "{found[3] if found else text}" is not known; write 8xH100 or 2x8xH100, with one of {", ".join(GPU_GB)}')
    return Gpus(text, int(found[1] or 1) * int(found[2]), GPU_GB[found[3]] * GB, PEAK_BF16[found[3].partition("-")[0]])


@dataclasses.dataclass(frozen=True)
class Size:
    """What a config is, whatever it runs on: parameters of each kind and FLOPs a token (forward + backward, attention causal)."""

    stored: int
    active: int
    embedding: int
    flops: float
    block: int  # parameters of one stored block
    root: int  # parameters outside the blocks


def size(cfg: Config) -> Size:
    """Counted on the model itself, on no device; Refusal where the config claims another number."""
    with torch.device("meta"):
        model = Transformer(cfg)
    counts = model.counts()
    if counts["stored"] != cfg.expect_params:
        raise Refusal(f"{cfg.name}: {counts['stored']:,} parameters, the config claims expect_params = {cfg.expect_params:,}: correct one of them")
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return Size(**counts, flops=model.flops_per_token(), block=block, root=counts["stored"] - cfg.n_layer * block)


def saved_per_token(cfg: Config) -> float:
    """Bytes a token that backward keeps of one application whose activations are not recomputed.

    Residual stream before each norm, fp32: 4d + 4d. bf16: the norm's output cast once for each of q, k, v, gate and up (autocast caches
    casts of weights only) 10d; q, k, v and the output of attention 8d, and its log-sum-exp, fp32, one a head (what flash attention
    saves on CUDA; the CPU's kernel keeps the same); gate, silu(gate), up and their product 8 ffn_hidden.
    """
    return (26 + 2 * NORM_SAVES) * cfg.n_embd + 8 * cfg.ffn_hidden + 4 * cfg.n_head


def recomputed(cfg: Config, ckpt: str) -> int:
    """Applications that backward runs again. In stack order a block's forward is one application, so that "loop" recomputes none."""
    later = cfg.n_layer * (cfg.n_loop - 1) if cfg.loop_order == "layer" else 0
    return {"none": 0, "loop": later, "all": cfg.n_layer * cfg.n_loop}[ckpt]


def moments(cfg: Config, s: Size, ckpt: str, micro: int) -> list[dict[str, float]]:
    """Bytes by part, beside the model's own state, at the moments one of which is the peak: the last loss chunk of forward, the
    first two of backward, and the backward of the last application.

    A weight is cast to bf16 at each use (train.autocast keeps no cache), and backward keeps the casts of what it does not recompute.
    """
    d, tokens = cfg.n_embd, micro * cfg.window
    again, application = recomputed(cfg, ckpt), saved_per_token(cfg) * tokens
    saved = (cfg.n_layer * cfg.n_loop - again) * application + again * 4 * d * tokens
    last = (8 + NORM_SAVES) * d * tokens  # the last norm's input and fp32 output
    logit, head, block = math.ceil(tokens / cfg.loss_chunks) * cfg.vocab_size, 2 * cfg.vocab_size * d, 2 * s.block
    kept = (cfg.n_layer * cfg.n_loop - again) * block
    rerun = application - 4 * d * tokens + block if again else 0  # one application made whole again, with its own casts
    return [
        # fp32 logits and log-softmax
        {"activations": saved + last, "logits, loss": 8 * logit, "bf16 weights": kept + head, "backward": 0},
        # log-softmax and two fp32 gradients of the second chunk, the head's fp32 gradient of the first, the stream's
        {"activations": saved + last, "logits, loss": 12 * logit, "bf16 weights": kept + head, "backward": 2 * head + 4 * d * tokens},
        # a little later: what is left of the logits, and the head's gradient of the second chunk beside that of the first
        {"activations": saved + last, "logits, loss": 8 * logit, "bf16 weights": kept + head, "backward": 4 * head + 4 * d * tokens},
        # the stream's fp32 gradient and two bf16 ones of the hidden width
        {"activations": saved, "logits, loss": 0, "bf16 weights": kept, "backward": rerun + (4 * d + 4 * cfg.ffn_hidden) * tokens},
    ]


def state(cfg: Config, s: Size, world: int, accum: int, zero: int) -> dict[str, float]:
    """Bytes by part of the model's own state on one GPU: all fp32, 4 a parameter (Adam 8).

    ddp and one GPU hold everything; ddp's gradients live in its buckets. fsdp shards what is kept. zero 2 gathers all
    once a step and adds up whole gradients until the last micro-batch; zero 3 holds the root and two blocks and reduces every time.
    """
    whole = 4 * s.stored
    if world == 1 or cfg.parallel == "ddp":
        return {"weights": whole, "gradients": whole, "Adam": 2 * whole, "gathered weights": 0, "unsharded gradients": 0}
    part, passing, adding = whole / (cfg.shard_ranks or world), 4 * (s.root + 2 * s.block), zero == 2 and accum > 1
    # where whole gradients add up, the sharded ones are made block by block, in place of activations freed by then
    grads = {"gradients": 0, "unsharded gradients": whole} if adding else {"gradients": part, "unsharded gradients": 4 * cfg.vocab_size * cfg.n_embd}
    return {"weights": part, "Adam": 2 * part, "gathered weights": whole if zero == 2 else passing, **grads}


def memory(cfg: Config, s: Size, world: int, ckpt: str, micro: int, zero: int) -> dict[str, float]:
    """Bytes by part on one GPU at the peak of a step."""
    peak = max(moments(cfg, s, ckpt, micro), key=lambda m: sum(m.values()))
    return state(cfg, s, world, cfg.batch // world // micro, zero) | peak


def micro_batches(cfg: Config, world: int) -> list[int]:
    """Micro-batches that divide a rank's share of the batch, the largest first. train.split_batch refuses what does not divide."""
    train.WORLD = world  # it reads the number of ranks there
    train.split_batch(cfg)
    return [m for m in range(cfg.batch // world, 0, -1) if cfg.batch // world % m == 0]


def choose(cfgs: list[Config], gpus: Gpus) -> tuple[str, int]:
    """(ckpt, micro-batch): least recomputation, then largest micro-batch, that fits every config, since all arms share one policy."""
    sizes = [size(c) for c in cfgs]
    for ckpt in train.CHOICES["ckpt"]:  # from no recomputation to all
        for micro in micro_batches(cfgs[0], gpus.count):
            if all(sum(memory(c, s, gpus.count, ckpt, micro, c.zero).values()) <= gpus.usable for c, s in zip(cfgs, sizes)):
                return ckpt, micro
    raise Refusal(f"{gpus.text}: not even ckpt=all with a micro-batch of 1 fits in {gpus.usable / GIB:.1f} GiB; take more or larger GPUs")


def run_hours(cfg: Config, gpus: Gpus, mfu: float) -> float:
    """Training hours of one run."""
    return total_steps(cfg) * cfg.batch * cfg.window * size(cfg).flops / (gpus.count * gpus.peak * mfu) / 3600


def side_hours(cfg: Config, gpus: Gpus, mfu: float) -> dict[str, float]:
    """Hours a run spends beside training: on the val set (forward only, a third of the FLOPs), on saves, on the suite.

    A resume state every save_every steps or 15 minutes, best.pt at every eval at worst; the suite scores best and final, a GPU each.
    """
    evals, stored = math.ceil(total_steps(cfg) / cfg.eval_every) + 1, size(cfg).stored
    forward = size(cfg).flops / 3 / (gpus.peak * mfu) / 3600  # hours a token, one GPU
    saves = max(total_steps(cfg) / cfg.save_every, run_hours(cfg, gpus, mfu) * 3600 / train.SAVE_SECONDS)
    return {
        "val": evals * n_windows(cfg.val_tokens, cfg.window) * cfg.window * forward / gpus.count,
        "saves": (saves * 12 + (evals + 1) * 4) * stored / DISK / 3600,
        "suite": (SUITE_TOKENS + cfg.val_tokens) * forward * (1 if gpus.count > 1 else 2),
    }


def bill(cfgs: list[Config], gpus: Gpus, mfu: float, runs: int) -> dict[str, float]:
    """Wall hours by stage of `runs` runs, shared evenly by the configs, one after the other; the probe is of the first config."""
    each = runs / len(cfgs)
    sides = [side_hours(c, gpus, mfu) for c in cfgs]
    stages = {"tokenizing": (cfgs[0].unique_tokens + cfgs[0].val_tokens) / TOKENIZED / 3600, "LR probe": PROBE * run_hours(cfgs[0], gpus, mfu)}
    stages["training"] = each * sum(run_hours(c, gpus, mfu) for c in cfgs)
    return stages | {k: each * sum(side[k] for side in sides) for k in sides[0]}


def disk(cfgs: list[Config], runs: int) -> dict[str, float]:
    """Bytes on disk: uint16 bins; best.pt and final.pt (4 a parameter each), last/ and last.old/ (12 each) of every run; what stands
    beside them during a save, when a third resume state does."""
    stored, tokens = [size(c).stored for c in cfgs], cfgs[0].unique_tokens + cfgs[0].val_tokens
    return {"data": 2 * tokens, "checkpoints": runs / len(cfgs) * guard.RUN_BYTES * sum(stored), "during a save": 12 * max(stored)}


def show_config(cfg: Config, gpus: Gpus, micro: int) -> None:
    """One config: counts, schedule, memory under every ckpt setting at one micro-batch, zero 2 and 3."""
    s, steps, tokens = size(cfg), total_steps(cfg), cfg.batch * cfg.window
    epochs = steps * cfg.batch / n_windows(cfg.unique_tokens, cfg.window)
    print(f"\n{cfg.arm} {cfg.rung}: stored {s.stored:,}, active {s.active:,}, embedding {s.embedding:,} parameters")
    print(f"  {s.flops:.3e} FLOPs a token, {s.flops * steps * tokens:.3e} a run; {steps:,} steps of {tokens:,} tokens, {epochs:.4f} epochs")
    print(f"  micro-batch {micro} x accumulation {cfg.batch // gpus.count // micro} on each of {gpus.count} GPUs")
    show_memory(cfg, s, gpus, micro)
    for what, each in (("best.pt or final.pt", 4), ("last/", 12)):
        print(f"  a save of {what}: {each * s.stored / GB:.2f} GB, {each * s.stored / DISK:.0f} s at {DISK / GB:g} GB/s")


def show_memory(cfg: Config, s: Size, gpus: Gpus, micro: int) -> None:
    sharded = cfg.parallel == "fsdp" and gpus.count > 1
    settings = [(ckpt, zero) for zero in ((2, 3) if sharded else (cfg.zero,)) for ckpt in train.CHOICES["ckpt"]]
    columns = {f"{c}, zero {z}" if sharded else c: memory(cfg, s, gpus.count, c, micro, z) for c, z in settings}
    print(f"  GiB a GPU at micro-batch {micro}, ckpt = " + "".join(f"{c:>14}" for c in columns))
    for part in next(iter(columns.values())):
        print(f"    {part:<33}" + "".join(f"{m[part] / GIB:14.2f}" for m in columns.values()))
    sums = [sum(m.values()) for m in columns.values()]
    print(f"    {'sum':<33}" + "".join(f"{t / GIB:14.2f}" for t in sums))
    print(f"    {f'fits in {gpus.usable / GIB:.1f} GiB':<33}" + "".join(f"{'yes' if t <= gpus.usable else 'NO':>14}" for t in sums))
    print(f"    {'compute recomputed':<33}" + "".join(f"{recompute_share(cfg, s, c):>+14.0%}" for c, _ in settings))


def recompute_share(cfg: Config, s: Size, ckpt: str) -> float:
    """Extra FLOPs of recomputation over a step's own: a third of what is run again, blocks only."""
    blocks = 1 - 6 * cfg.vocab_size * cfg.n_embd / s.flops
    return recomputed(cfg, ckpt) / (cfg.n_layer * cfg.n_loop) * blocks / 3


def show_table(cfgs: list[Config], gpus: Gpus, setting: tuple[str, int], mfu: float, price: float) -> None:
    print(f"\n{'config':<10}{'stored':>15}{'FLOPs/token':>13}{'GiB':>8}{'hours':>8}{'$ a run':>9}{'GB on disk':>12}")
    for cfg in cfgs:
        s, hours = size(cfg), run_hours(cfg, gpus, mfu)
        gib, cost = sum(memory(cfg, s, gpus.count, *setting, cfg.zero).values()) / GIB, f"{hours * gpus.count * price:,.0f}"
        print(f"{cfg.arm + ' ' + cfg.rung:<10}{s.stored:>15,}{s.flops:>13.3e}{gib:>8.1f}{hours:>8.2f}{cost:>9}{guard.RUN_BYTES * s.stored / GB:>12.1f}")


def show_bill(cfgs: list[Config], gpus: Gpus, mfu: float, price: float, runs: int) -> None:
    stages, space = bill(cfgs, gpus, mfu, runs), disk(cfgs, runs)
    hours = sum(stages.values())
    print(f"\n{runs} runs on {gpus.text} at MFU {mfu:.0%}, ${price:g} a GPU-hour: {hours:.1f} h, ${hours * gpus.count * price:,.0f}")
    print("  hours: " + ", ".join(f"{k} {v:.2f}" for k, v in stages.items()))
    print("  disk, GB: " + ", ".join(f"{k} {v / GB:.1f}" for k, v in space.items()) + f"; have {sum(space.values()) / GB:.0f}")


def show_rows(mfu: float) -> None:
    """The README's rows: V and L, two seeds each."""
    print(f"Four runs (V and L, two seeds) at MFU {mfu:.0%}; hours and $ of all count tokenizing, probe, evals and saves. GPU prices are assumed.\n")
    print("| rung | GPUs | $ a GPU-hour | setting | GiB a GPU, V / L | usable GiB | hours a run | $ a run | hours, all | $, all | disk GB |")
    print("|" + " - |" * 11)
    for rung, text, price in ROWS:
        cfgs, gpus = [load_config([str(train.guard.HERE / "config" / f"{arm}_{rung}.py")]) for arm in "VL"], parse_gpus(text)
        ckpt, micro = choose(cfgs, gpus)
        gib = " / ".join(f"{sum(memory(c, size(c), gpus.count, ckpt, micro, c.zero).values()) / GIB:.1f}" for c in cfgs)
        one, every = run_hours(cfgs[0], gpus, mfu), sum(bill(cfgs, gpus, mfu, 4).values())
        cells = [rung, text, f"{price:.2f}", f"ckpt={ckpt}, {micro} x {cfgs[0].batch // gpus.count // micro}", gib, f"{gpus.usable / GIB:.1f}", f"{one:.1f}"]
        cells += [f"{one * gpus.count * price:,.0f}", f"{every:.1f}", f"{every * gpus.count * price:,.0f}", f"{sum(disk(cfgs, 4).values()) / GB:.0f}"]
        print("| " + " | ".join(cells) + " |")


def parse(args: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("configs", nargs="*", metavar="CONFIG")
    p.add_argument("--gpus", default="8xH100", help=f"[nodes x] GPUs x name: {', '.join(GPU_GB)}")
    p.add_argument("--price", type=float, default=2.0, help="$ a GPU-hour")
    p.add_argument("--mfu", type=float, default=0.40, help="share of the dense bf16 peak that model FLOPs reach")
    p.add_argument("--runs", type=int, help="runs in all, a multiple of the configs; default: two seeds of each")
    p.add_argument("--table", action="store_true", help="the README's rows instead")
    a = p.parse_args(args)
    if bool(a.configs) == a.table:
        raise Refusal("plan.py: give one or more configs, or --table (python plan.py --help)")
    a.runs = 2 * len(a.configs) if a.runs is None else a.runs
    if not (a.price >= 0 and 0 < a.mfu <= 1 and a.runs >= 1 and a.runs % max(1, len(a.configs)) == 0 or a.table):
        raise Refusal(f"--price must be >= 0, --mfu in (0, 1], --runs a multiple of the {len(a.configs)} configs")
    return a


def main(args: list[str]) -> None:
    a = parse(args)
    if a.table:
        return show_rows(a.mfu)
    gpus, cfgs = parse_gpus(a.gpus), [load_config([path]) for path in a.configs]
    if len({c.rung for c in cfgs}) > 1:
        raise Refusal(f"one rung at a time: these are of {', '.join(sorted({c.rung for c in cfgs}))}")
    setting = choose(cfgs, gpus)
    for cfg in cfgs:
        show_config(cfg, gpus, setting[1])
    if len(cfgs) > 1:
        show_table(cfgs, gpus, setting, a.mfu, a.price)
    print(f"\nchoose --ckpt={setting[0]} --micro_batch={setting[1]}: the least recomputation, then the largest micro-batch, that fits all of these alike")
    show_bill(cfgs, gpus, a.mfu, a.price, a.runs)


if __name__ == "__main__":
    main(sys.argv[1:])
