"""Score checkpoints: the rung's suite under lm-eval, zero-shot, and the loss of every val window. Writes evals/<rung>/<run>_{best,final}.json.

python eval.py out/nano/L_s0/best.pt out/nano/L_s0/final.pt        # the registered suite; done ones are skipped
python eval.py out/nano/L_s0/best.pt --tasks=cloze --limit=50      # a look: prints, records nothing
python eval.py out/nano/L_s0/best.pt --sample="def main("          # continue a text, greedily
"""

import argparse
import hashlib
import logging
import math
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train.py
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap of a perplexity would fork a pool

import numpy as np
import torch
import torch.nn.functional as F

import guard
from guard import Refusal
from model import Transformer
from prepare import get_tokenizer
from train import Config, autocast, compute_dtype, fetch, n_windows, setup_device

BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536, "mps": 16_384}  # tokens a forward, padding included; recorded, the same for all arms
BOOTSTRAP = 1000  # lm-eval's resamples for the standard error of a perplexity

# ---- model ------------------------------------------------------------------------------------------------------------


def load_model(path: str, device: torch.device) -> tuple[Transformer, Config, dict]:
    """A checkpoint's model on the device in eval mode, its Config, and the checkpoint without the weights."""
    ckpt = guard.load_checkpoint(path)
    try:
        cfg = Config(**ckpt["config"])
        with torch.device("meta"):
            model = Transformer(cfg)
        model = model.to_empty(device=device)
        model.make_rope(device)
        model.load_state_dict(ckpt.pop("model"))
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise Refusal(f"{path}: not a checkpoint of this model ({str(e).splitlines()[0]})") from None
    return model.eval(), cfg, ckpt


@torch.no_grad()
def score_tokens(model: Transformer, pairs: list[tuple[list[int], list[int]]], device, dtype, batch_tokens: int) -> list[tuple[float, bool, np.ndarray]]:
    """For each (inputs, targets): (sum of log-probabilities in nats, all greedy, the log-probabilities) of targets, which follow the last inputs.

    targets[j] is predicted at inputs[len(inputs) - len(targets) + j]. Longest first, right-padded, batched by tokens; the head and
    an fp32 log-softmax run on scored positions only.
    """
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i]))
    out: list = [None] * len(pairs)
    while order:
        width = len(pairs[order[0]][0])
        take, order = order[: max(1, batch_tokens // width)], order[max(1, batch_tokens // width) :]
        tokens = torch.zeros(len(take), width, dtype=torch.long)
        for row, i in enumerate(take):
            tokens[row, : len(pairs[i][0])] = torch.tensor(pairs[i][0])
        at = [(row, len(pairs[i][0]) - len(pairs[i][1]) + j) for row, i in enumerate(take) for j in range(len(pairs[i][1]))]
        rows, cols = (torch.tensor(a, device=device) for a in zip(*at))
        with autocast(device, dtype):
            logits = model.head(model.hidden(tokens.to(device))[rows, cols]).float()
        targets = torch.tensor([t for i in take for t in pairs[i][1]], device=device)
        logp = F.log_softmax(logits, dim=-1)
        picked, greedy = logp.gather(1, targets[:, None])[:, 0].cpu().numpy(), (logp.argmax(-1) == targets).cpu().numpy()
        end = 0
        for i in take:
            start, end = end, end + len(pairs[i][1])
            out[i] = (float(picked[start:end].sum(dtype=np.float64)), bool(greedy[start:end].all()), picked[start:end])
    return out


@torch.no_grad()
def continue_tokens(model: Transformer, ids: list[int], n: int, eot: int, vocab_size: int, device, dtype, done=lambda ids: False) -> list[int]:
    """Up to n tokens after ids, greedily, the last `window` tokens as context; ends at EOT or when done(new ids) says so."""
    new: list[int] = []
    while len(new) < n and not done(new):
        context = torch.tensor([(ids + new)[-model.c.window :]], device=device)
        with autocast(device, dtype):
            logits = model.head(model.hidden(context)[:, -1]).float()
        token = int(logits[0, :vocab_size].argmax())  # rows beyond the tokenizer's vocabulary are padding
        if token == eot:
            break
        new.append(token)
    return new


# ---- lm-eval ----------------------------------------------------------------------------------------------------------


def make_lm(model: Transformer, tok, device, dtype, batch_tokens: int):
    """lm-eval's view of our model (a TemplateLM). Built in a function so that a skipped eval need not import lm-eval."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class LoopLM(TemplateLM):
        max_length, truncated = model.c.window, 0  # truncated: continuations longer than the window, scored over their end

        @property
        def eot_token_id(self) -> int:
            return tok.eot

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
            return tok.encode(string)

        def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            # a context of spaces alone comes here empty: lm-eval has moved them to the continuation
            pairs = [(((context or [tok.eot]) + target)[-self.max_length - 1 : -1], target[-self.max_length :]) for _, context, target in requests]
            self.truncated += sum(len(target) > self.max_length for _, _, target in requests)
            return [(total, greedy) for total, greedy, _ in score_tokens(model, pairs, device, dtype, batch_tokens)]

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            windows = [
                [make_disjoint_window(w) for w in get_rolling_token_windows(tok.encode(r.args[0]), self.prefix_token_id, self.max_length, 1)] for r in requests
            ]
            scores = iter(self._loglikelihood_tokens([("", *w) for doc in windows for w in doc]))
            return [sum(next(scores)[0] for _ in doc) for doc in windows]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            out = []
            for context, kwargs in (r.args for r in requests):
                until = [kwargs["until"]] if isinstance(kwargs["until"], str) else kwargs["until"]
                stop = lambda new, until=until: any(u in tok.decode(new) for u in until)
                text = tok.decode(
                    continue_tokens(model, tok.encode(context) or [tok.eot], kwargs.get("max_gen_toks", 256), tok.eot, tok.vocab_size, device, dtype, stop)
                )
                out.append(min((text.split(u)[0] for u in until if u), key=len, default=text))
            return out

    return LoopLM()


def find_tasks(names: list[str], data: Path):
    """(tasks for simple_evaluate, TaskManager): those that prepare.py made beside the data first, lm-eval's own otherwise."""
    import yaml
    from lm_eval.tasks import TaskManager

    local = {p.stem: p for p in (data / "tasks").glob("*.yaml")}
    manager = TaskManager(include_defaults=any(n not in local for n in names))  # the defaults take 15 s to index
    for name in names:
        if name not in local and name not in manager.all_tasks:
            raise Refusal(
                f'unknown task "{name}": neither in {data / "tasks"} ({", ".join(sorted(local)) or "none"}) nor one of lm-eval\'s {len(manager.all_tasks)}'
            )
    files = {n: {"dataset_kwargs": {"data_files": {"test": str(p.with_suffix(".jsonl"))}}} for n, p in local.items()}
    return [yaml.safe_load(local[n].read_text()) | files[n] if n in local else n for n in names], manager


def run_suite(lm, metrics: dict[str, str], data: Path, limit: int | None) -> dict:
    """The tasks' scores, errors and per-item outcomes: {"tasks", "mean" (points), "mean_stderr", "items", "items_sha256"}."""
    if all((data / "tasks" / f"{n}.yaml").exists() for n in metrics):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # local files only: nothing to ask a hub
    from lm_eval import simple_evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks, manager = find_tasks(list(metrics), data)
    got = simple_evaluate(lm, tasks=tasks, num_fewshot=0, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=True, task_manager=manager, verbosity="ERROR")
    out: dict = {"tasks": {}, "items": {}, "items_sha256": {}}
    for name, metric in metrics.items():
        scores, samples = got["results"][name], sorted(got["samples"][name], key=lambda s: s["doc_id"])
        others = {k.split(",")[0]: v for k, v in scores.items() if "," in k and not k.startswith(metric) and isinstance(v, float)}
        out["tasks"][name] = {
            "metric": metric,
            "value": scores[f"{metric},none"],
            "stderr": scores[f"{metric}_stderr,none"],
            "n": len(samples),
            "version": got["versions"][name],
            **others,
        }
        out["items"][name] = "".join(str(int(s[metric])) for s in samples)
        out["items_sha256"][name] = hashlib.sha256("".join(s["doc_hash"] for s in samples).encode()).hexdigest()
    values, errors = [t["value"] for t in out["tasks"].values()], [t["stderr"] for t in out["tasks"].values()]
    return out | {"mean": 100 * sum(values) / len(values), "mean_stderr": 100 * math.sqrt(sum(e**2 for e in errors)) / len(errors)}


# ---- val --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_val(model: Transformer, cfg: Config, device, dtype) -> dict:
    """The loss sum of every full val window (nats, fp32 losses summed in fp64), the mean, and bits per byte of the text."""
    manifest, _, val = guard.open_data(guard.HERE / cfg.data)
    sums, n = [], n_windows(len(val), cfg.window)
    for i in range(0, n, cfg.micro_batch):
        x, y = fetch(val, np.arange(i, min(n, i + cfg.micro_batch)), cfg.window, device)
        with autocast(device, dtype):
            loss = model(x, y, "none")
        sums += loss.cpu().double().sum(1).tolist()
    mean = sum(sums) / (n * cfg.window)
    bits = mean / math.log(2) * manifest["val"]["tokens"] / manifest["val"]["text_bytes"]
    return {
        "loss": mean,
        "bits_per_byte": bits,
        "tokens_per_window": cfg.window,
        "sha256": manifest["val"]["sha256"],
        "loss_sums": [round(s, 4) for s in sums],
    }


# ---- one checkpoint ---------------------------------------------------------------------------------------------------


def record_path(path: str) -> Path:
    """evals/<rung>/<run>_<best|final>.json of a checkpoint at out/<rung>/<run>/<best|final>.pt."""
    p = Path(path).resolve()
    if p.parent.parent.parent != guard.HERE / "out" or p.stem not in ("best", "final"):
        raise Refusal(f"{path}: only out/<rung>/<run>/best.pt and final.pt have a place in evals/; for others give --limit, --tasks or --sample")
    return guard.HERE / "evals" / p.parent.parent.name / f"{p.parent.name}_{p.stem}.json"


def is_recorded(path: str) -> bool:
    """Whether evals/ already holds this very checkpoint, by the sha256 that the results file says; the checkpoint may be gone."""
    record = record_path(path)
    result = guard.HERE / "results" / record.parent.name / f"{Path(path).resolve().parent.name}.json"
    if not (record.exists() and result.exists()):
        return False
    entry = guard.read_json(result)[Path(path).stem]
    return bool(entry) and guard.read_json(record)["checkpoint_sha256"] == entry["sha256"]


def evaluate_checkpoint(path: str, args) -> None:
    """Score one checkpoint; print the table; write the record unless only a part was asked for."""
    partial = args.tasks is not None or args.limit is not None
    if not partial and is_recorded(path):
        print(f"{record_path(path).relative_to(guard.HERE)}: done already")
        return
    start, device = time.perf_counter(), args.torch_device
    model, cfg, ckpt = load_model(path, device)
    dtype, data = compute_dtype(cfg, device), guard.HERE / cfg.data
    tok = get_tokenizer(guard.read_json(data / "manifest.json")["tokenizer"])
    metrics = guard.read_json(guard.HERE / "config" / f"bars_{cfg.rung}.json")["tasks"]
    if args.tasks is not None:
        metrics = {t: metrics.get(t, "acc") for t in args.tasks.split(",")}
    batch_tokens = BATCH_TOKENS[device.type]
    lm = make_lm(model, tok, device, dtype, batch_tokens)
    out = run_suite(lm, metrics, data, args.limit)
    scores = "  ".join(f"{n} {t['metric']} {100 * t['value']:.2f} +- {100 * t['stderr']:.2f} (n={t['n']})" for n, t in out["tasks"].items())
    print(f"{cfg.name} {Path(path).stem}: {scores}  mean {out['mean']:.2f}")
    if partial:
        return
    import lm_eval

    val = score_val(model, cfg, device, dtype)
    record = record_path(path)
    guard.write_json(
        record,
        {
            "name": cfg.name, "arm": cfg.arm, "seed": cfg.seed, "tag": cfg.tag, "rung": cfg.rung, "checkpoint": Path(path).stem, "step": ckpt["step"],
            "checkpoint_sha256": guard.sha256_file(path), **out, "limit": args.limit, "truncated_continuations": lm.truncated, "val": val,
            "batch_policy": {"order": "longest first", "batch_tokens": batch_tokens, "dtype": str(dtype).removeprefix("torch."), "device": device.type},
            "lm_eval": lm_eval.__version__, "versions": guard.versions(), "sec": time.perf_counter() - start,
        },
    )  # fmt: skip
    print(f"{record.relative_to(guard.HERE)}: val {val['loss']:.4f} nats, {val['bits_per_byte']:.4f} bits a byte, {time.perf_counter() - start:.0f} s")


def sample(path: str, args) -> None:
    model, cfg, _ = load_model(path, args.torch_device)
    tok = get_tokenizer(guard.read_json(guard.HERE / cfg.data / "manifest.json")["tokenizer"])
    new = continue_tokens(
        model, tok.encode(args.sample) or [tok.eot], args.max_new, tok.eot, tok.vocab_size, args.torch_device, compute_dtype(cfg, args.torch_device)
    )
    print(args.sample + tok.decode(new))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoints", nargs="+", metavar="CKPT")
    p.add_argument("--tasks", help="comma-separated; default: the tasks of the rung's bars file")
    p.add_argument("--limit", type=int, help="items a task, for a look")
    p.add_argument("--sample", metavar="TEXT", help="continue TEXT instead of scoring")
    p.add_argument("--max_new", type=int, default=200, help="tokens to sample at most")
    p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    args = p.parse_args()
    if args.tasks == "" or (args.limit is not None and args.limit < 2):
        p.error("--tasks wants a name, --limit at least 2 items")
    args.torch_device = setup_device(argparse.Namespace(device=args.device))
    for path in args.checkpoints:
        sample(path, args) if args.sample is not None else evaluate_checkpoint(path, args)


if __name__ == "__main__":
    main()
