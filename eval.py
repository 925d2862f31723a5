"""Score checkpoints: the rung's suite under lm-eval, zero-shot, and the loss of every val window. Writes evals/<rung>/<run>_{best,final}.json.

python eval.py out/nano/L_s0/best.pt out/nano/L_s0/final.pt        # the registered suite; done ones are skipped
torchrun --nproc_per_node=8 eval.py out/1b/L_s0/best.pt            # the work split over GPUs, the scores the same
python eval.py out/nano/L_s0/best.pt --tasks=cloze --limit=50      # a look: prints, records nothing
python eval.py out/nano/L_s0/best.pt --n_loop=3                    # a looped model at another number of loops, eps as trained
python eval.py out/nano/L_s0/best.pt --sample="def main("          # continue a text, greedily
python eval.py --from_hf HuggingFaceTB/SmolLM2-135M --suite=1b     # a Llama-family folder or hub name: the harness against a published score
python eval.py --cache --suite=1b                                  # download what the suite needs, before a node without network
python eval.py --overlap --suite=1b --data=data/1b                 # how much of the test sets stands in the training set
"""

import argparse
import contextlib
import gc
import hashlib
import importlib.util
import logging
import math
import os
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

for key in ("DISABLE_MULTIPROC", "TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # no pool forked for a bootstrap; no bars but ours
    os.environ.setdefault(key, "1")

import train  # isort: skip, first: under torchrun it ties a worker's life to its launcher before torch is imported
import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import guard
import hf
from guard import Refusal
from model import Cache, Transformer
from prepare import get_tokenizer, hub_down, tiktoken_folder
from train import RANK, WORLD, Config, autocast, compute_dtype, fetch, gather, n_windows, say, setup_device

BATCH_TOKENS = {"cpu": 4096, "cuda": 16_384, "mps": 16_384}  # tokens a forward, padding included; recorded, the same for all arms
HEAD_ROWS = 256  # positions whose logits exist at a time
PACK = 512  # tokens of a context's continuations that are read side by side
BOOTSTRAP = 1000  # lm-eval's resamples for the standard error of a perplexity
GRAM = {"byte": 64, "bits": 512}  # --overlap: tokens of a match, about as long as 13 tokens of a word-piece vocabulary
TASK_ROOT = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
TASK_FILES = {  # the registered tasks' own YAMLs: lm-eval's index of all its tasks takes 15 s
    "hellaswag": "hellaswag/hellaswag.yaml", "piqa": "piqa/piqa.yaml", "arc_easy": "arc/arc_easy.yaml", "arc_challenge": "arc/arc_challenge.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml", "winogrande": "winogrande/default.yaml", "boolq": "super_glue/boolq/default.yaml", "sciq": "sciq/sciq.yaml",
}  # fmt: skip

# ---- model ------------------------------------------------------------------------------------------------------------


def build(cfg: Config, weights: dict[str, torch.Tensor], device: torch.device) -> Transformer:
    """A model of these weights (its own from here on: on a CPU they are not copied) on the device, in eval mode."""
    with torch.device("meta"):
        model = Transformer(cfg)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:  # other names or sizes
        raise ValueError(" ".join(str(e).split())[:300]) from None
    if cfg.tied:
        model.head.weight = model.embed.weight
    model.make_rope(device)
    return model.to(device).requires_grad_(False).eval()


def peek(path: str) -> Config:
    """A checkpoint's Config without its weights."""
    try:
        cfg = Config(**torch.load(path, map_location="cpu", weights_only=True, mmap=True)["config"])
        if not (cfg.rung and cfg.arm):
            raise ValueError
        return cfg
    except Exception:  # noqa: BLE001, load_checkpoint says what is wrong with it
        return load_model(path, torch.device("cpu"))[1]


def load_model(path: str, device: torch.device, n_loop: int = 0) -> tuple[Transformer, Config, dict]:
    """A checkpoint's model on the device in eval mode, its Config (n_loop replaced if given), and the checkpoint without the weights."""
    ckpt = guard.load_checkpoint(path)
    try:
        cfg = Config(**ckpt["config"])
        cfg.n_loop = n_loop or cfg.n_loop  # eps is in the saved config as trained
        model = build(cfg, ckpt.pop("model"), device)
    except (KeyError, TypeError, ValueError) as e:
        raise Refusal(f"{path}: not a checkpoint of this model ({hf.first_line(e)})") from None
    return model, cfg, ckpt


# ---- scoring ----------------------------------------------------------------------------------------------------------


def read(model: Transformer, rows: list[list[int]], device, dtype, cache: Cache | None = None) -> torch.Tensor:
    """Final activations (len(rows), longest, n_embd) of right-padded rows, which follow what the cache holds."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    with autocast(device, dtype):
        return model.hidden(tokens.to(device), cache)


def log_probs(model: Transformer, h: torch.Tensor, at: list[tuple[int, int, int]], dtype) -> list[tuple[float, bool]]:
    """(log-probability in nats, greedy) of each (row, column, target): the head and an fp32 log-softmax at scored positions only."""
    out = []
    for i in range(0, len(at), HEAD_ROWS):
        rows, cols, targets = torch.tensor(at[i : i + HEAD_ROWS], device=h.device).T
        with autocast(h.device, dtype):
            logp = F.log_softmax(model.head(h[rows, cols]).float(), dim=-1)
        picked = logp.gather(1, targets[:, None])[:, 0]
        out += zip(picked.tolist(), (logp.argmax(-1) == targets).tolist())
    return out


def plan_batches(pairs: list[tuple[list[int], list[int]]], batch_tokens: int) -> list[list[tuple[list[int], list[tuple[int, list[int]]]]]]:
    """Batches of (tokens read first, [(request, its tokens read after that)]), longest first; of the first, at most batch_tokens tokens, padding included.

    A context that several requests share is read once and what follows it from the cache; a request with a context of its own is read whole.
    """
    groups = defaultdict(list)
    for i, (inputs, targets) in enumerate(pairs):
        if targets:
            groups[tuple(inputs[: len(inputs) - len(targets) + 1])].append(i)
    rows = []
    for context, ids in groups.items():
        rest = [(i, pairs[i][0][len(context) :]) for i in ids]
        shared = len(ids) > 1 and len(context) > 1  # not the one token that begins every text
        rows += [(list(context), rest)] if shared else [(list(context) + more, [(i, [])]) for i, more in rest]
    rows.sort(key=lambda r: (-len(r[0]), r[0]))
    batches = []
    while rows:
        n = max(1, batch_tokens // len(rows[0][0]))
        batches.append(rows[:n])
        rows = rows[n:]
    return batches


def packs_of(batch) -> list[tuple[int, list[tuple[int, list[int]]]]]:
    """(row of the context, [(request, the rest of it)]): continuations of one context to be read side by side, at most PACK tokens of them, longest first."""
    packs = []
    for row, (_, requests) in enumerate(batch):
        size = PACK
        for i, rest in (r for r in requests if r[1]):
            if size + len(rest) > PACK:
                packs.append((row, []))
                size = 0
            packs[-1][1].append((i, rest))
            size += len(rest)
    return sorted(packs, key=lambda pack: -width_of(pack))


def width_of(pack) -> int:
    return sum(len(rest) for _, rest in pack[1])


def branch(cache: Cache, packs, device) -> Cache:
    """The cache as packs read it: each token sees its context and, of its pack, what stands before it in its own continuation."""
    rows, width = torch.tensor([row for row, _ in packs], device=device), max(map(width_of, packs))
    own, offset = torch.full((len(packs), width), -1), torch.zeros(len(packs), width, dtype=torch.long)
    for b, (_, requests) in enumerate(packs):
        sizes = torch.tensor([len(rest) for _, rest in requests])
        own[b, : sizes.sum()] = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        offset[b, : sizes.sum()] = torch.cat([torch.arange(n) for n in sizes.tolist()])
    own, order, lengths = own.to(device), torch.arange(width, device=device), cache.lengths[rows, None]
    old = torch.arange(next(iter(cache.kv.values()))[0].shape[2], device=device) < lengths
    new = (own[:, :, None] == own[:, None, :]) & (order <= order[:, None])
    other, at = cache.fork(rows), lengths + offset.to(device)
    other.mask = torch.cat((old[:, None].expand(-1, width, -1), new), dim=2)[:, None]
    other.positions = lambda T: at
    return other


def score_batch(model: Transformer, batch, pairs, device, dtype, batch_tokens: int) -> dict[int, list[tuple[float, bool]]]:
    """{request: (log-probability, greedy) of each of its targets} of one batch of plan_batches."""
    out, first, packs = defaultdict(list), [tokens for tokens, _ in batch], packs_of(batch)

    def score(h: torch.Tensor, at: list[tuple[int, int, int]], ids: list[int]) -> None:
        for i, found in zip(ids, log_probs(model, h, at, dtype), strict=True):
            out[i].append(found)

    cache = Cache(torch.tensor([len(t) for t in first], device=device)) if packs else None
    h, at, ids = read(model, first, device, dtype, cache), [], []
    for row, (tokens, requests) in enumerate(batch):
        for i, rest in requests:
            now = pairs[i][1][: len(pairs[i][1]) - len(rest)]  # their last one stands at the row's end
            at += [(row, len(tokens) - len(now) + j, target) for j, target in enumerate(now)]
            ids += [i] * len(now)
    score(h, at, ids)
    while packs:
        width, old = width_of(packs[0]), len(first[0])
        n = max(1, min(batch_tokens // width, 4 * batch_tokens // (old + width)))  # the old keys are copied for each pack
        part, packs = packs[:n], packs[n:]
        h, at, ids = read(model, [[t for _, rest in r for t in rest] for _, r in part], device, dtype, branch(cache, part, device)), [], []
        for row, (_, requests) in enumerate(part):
            targets = [(i, t) for i, rest in requests for t in pairs[i][1][-len(rest) :]]
            at += [(row, j, t) for j, (_, t) in enumerate(targets)]
            ids += [i for i, _ in targets]
        score(h, at, ids)
    return out


def gathered(mine: dict) -> dict:
    """The entries of every rank's dict, on every rank."""
    return {k: v for part in gather(mine) for k, v in part.items()}


@torch.no_grad()
def score_tokens(model: Transformer, pairs: list[tuple[list[int], list[int]]], device, dtype, batch_tokens: int) -> list[tuple[float, bool]]:
    """For each (inputs, targets): (sum of log-probabilities in nats, all greedy) of targets, targets[j] predicted at inputs[len(inputs) - len(targets) + j].

    Batches are made first and then dealt out over the ranks, so that a score does not depend on how many there are.
    """
    scores, batches = {}, plan_batches(pairs, batch_tokens)[RANK::WORLD]
    with tqdm(total=sum(len(r) for b in batches for _, r in b), desc="requests", unit="", delay=5, leave=False, disable=RANK > 0) as bar:
        for batch in batches:
            scores |= score_batch(model, batch, pairs, device, dtype, batch_tokens)
            bar.update(sum(len(r) for _, r in batch))
    merged = gathered(scores)
    return [(math.fsum(p for p, _ in merged.get(i, [])), all(g for _, g in merged.get(i, []))) for i in range(len(pairs))]


@torch.no_grad()
def continue_tokens(model: Transformer, ids: list[int], n: int, eot: int | None, vocab_size: int, device, dtype, done=lambda ids: False) -> list[int]:
    """Up to n tokens after ids, greedily, the last `window` tokens as context; ends at EOT or when done(new ids) says so.

    Reads each token once, from a cache, until the window is full; then the context slides, every position changes, and it is read anew.
    """
    new, cache, window = [], None, model.c.window
    while len(new) < n and not done(new):
        context = (ids + new)[-window:]
        if cache is None or len(ids) + len(new) > window:
            cache = Cache(torch.tensor([len(context)], device=device)) if len(ids) + len(new) <= window else None
            h = read(model, [context], device, dtype, cache)
        else:
            h = read(model, [context[-1:]], device, dtype, cache)
            cache.lengths += 1
        with autocast(device, dtype):
            logits = model.head(h[:, -1]).float()
        token = int(logits[0, :vocab_size].argmax())  # rows beyond the tokenizer's vocabulary are padding
        if token == eot:
            break
        new.append(token)
    return new


# ---- lm-eval ----------------------------------------------------------------------------------------------------------


def make_lm(model: Transformer, tok, device, dtype, batch_tokens: int):
    """lm-eval's view of our model (a TemplateLM). Built in a function so that a skipped eval need not import lm-eval."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class LoopLM(TemplateLM):
        max_length, truncated = model.c.window, 0  # truncated: continuations longer than the window, scored over their end

        @property
        def eot_token_id(self) -> int:
            return tok.eot

        @property
        def prefix_token_id(self) -> int:  # what an empty context is
            return getattr(tok, "bos", tok.eot)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
            return tok.encode(string) if add_special_tokens is not False else getattr(tok, "encode_plain", tok.encode)(string)

        def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
            # a context of spaces alone comes here empty: lm-eval has moved them to the continuation
            pairs = [(((context or [self.prefix_token_id]) + target)[-self.max_length - 1 : -1], target[-self.max_length :]) for _, context, target in requests]
            self.truncated += sum(len(target) > self.max_length for _, _, target in requests)
            return score_tokens(model, pairs, device, dtype, batch_tokens)

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            windows = [
                [make_disjoint_window(w) for w in get_rolling_token_windows(tok.encode(r.args[0]), self.prefix_token_id, self.max_length, 1)] for r in requests
            ]
            scores = iter(self._loglikelihood_tokens([("", *w) for doc in windows for w in doc]))
            return [sum(next(scores)[0] for _ in doc) for doc in windows]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            asked, out = [(r.args[0], normalize_gen_kwargs(dict(r.args[1]), 256)) for r in requests], {}
            for _, kwargs in asked:
                if kwargs.get("do_sample") or kwargs["max_gen_toks"] >= self.max_length:
                    raise Refusal(f"texts are generated greedily and within the window of {self.max_length} tokens; a task asks for {kwargs}")
            for i in tqdm(range(len(asked))[RANK::WORLD], desc="texts", unit="", delay=5, leave=False, disable=RANK > 0):
                context, kwargs = asked[i]
                until, n = kwargs.get("until") or [], kwargs["max_gen_toks"]
                until = [u for u in ([until] if isinstance(until, str) else until) if u]
                stop = lambda new, until=until: any(u in tok.decode(new) for u in until)
                ids = (tok.encode(context) or [self.prefix_token_id])[-(self.max_length - n) :]  # room for what is generated, as in lm-eval's own
                text = tok.decode(continue_tokens(model, ids, n, tok.eot, tok.vocab_size, device, dtype, stop))
                out[i] = min((text.split(u)[0] for u in until), key=len, default=text)
            merged = gathered(out)
            return [merged[i] for i in range(len(requests))]

    return LoopLM()


def hub_dataset(name: str) -> tuple[str, str | None]:
    """(repository, configuration) of the data set of one of lm-eval's tasks in TASK_FILES, read from its YAML without importing lm-eval."""
    path = TASK_ROOT / TASK_FILES[name]
    text = path.read_text()
    if base := re.search(r"^include: (.+)$", text, re.MULTILINE):
        text = (path.parent / base[1]).read_text() + text
    found = {key: re.findall(rf"^{key}: (.+)$", text, re.MULTILINE)[-1] for key in ("dataset_path", "dataset_name")}
    return found["dataset_path"], None if found["dataset_name"] == "null" else found["dataset_name"]


def hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")


def check_hub(names: list[str]) -> None:
    """Refuse at once, by name, a task whose data set is neither cached nor to be had; where the hub does not answer, tell the libraries so."""
    home = hub_home()
    places = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets"), Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if not (why := hub_down()):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported
    for name in names:
        repo, part = hub_dataset(name)
        if not any(p.exists() for p in (Path(repo), places[0] / repo.replace("/", "___"), places[1] / f"datasets--{repo.replace('/', '--')}")):
            what = f"{repo}{f' ({part})' if part else ''}"
            raise Refusal(
                f"task {name}: its data set {what} is not in {home} and the hub cannot be asked ({why}); where there is network: bash run.sh cache, then copy that folder here"
            )


def find_tasks(names: list[str], data: Path) -> dict:
    """{name: lm-eval's task}: those that prepare.py made beside the data first, lm-eval's own otherwise. Refusal names a task or data set not to be had."""
    local = {p.stem: p for p in (data / "tasks").glob("*.yaml")}
    if all(n in local for n in names):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # local files only: nothing to ask a hub
    else:
        check_hub([n for n in names if n in TASK_FILES and n not in local])
    import yaml
    from lm_eval.tasks import TaskManager

    others = [n for n in names if n not in local and n not in TASK_FILES]
    manager, tasks = TaskManager(include_defaults=bool(others)), {}  # the defaults take 15 s to index
    for name in names:
        if name in others and name not in manager.all_tasks:
            raise Refusal(
                f'unknown task "{name}": neither in {data / "tasks"} ({", ".join(sorted(local)) or "none"}) nor one of lm-eval\'s {len(manager.all_tasks)}'
            )
        spec = str(TASK_ROOT / TASK_FILES[name]) if name in TASK_FILES else name
        if name in local:
            spec = yaml.safe_load(local[name].read_text()) | {"dataset_kwargs": {"data_files": {"test": str(local[name].with_suffix(".jsonl"))}}}
        try:
            tasks |= manager.load([spec])["tasks"]
        except Exception as e:  # noqa: BLE001, whatever datasets and the hub raise
            raise Refusal(f"task {name}: its data set cannot be loaded ({type(e).__name__}: {hf.first_line(e)}); bash run.sh cache downloads it") from None
    if odd := [n for n in names if n not in tasks]:
        raise Refusal(f"{odd[0]} is a group of tasks: name its tasks")
    return tasks


def right_answer(task, sample: dict) -> tuple[float, int]:
    """(log-likelihood in nats, bytes) of the right continuation of one item; of several right ones, of the likeliest.

    lm-eval scores the spaces at a context's end with the continuation: they count among its bytes.
    """
    gold = 0
    if task.OUTPUT_TYPE == "multiple_choice":
        gold = task.doc_to_text(sample["doc"]) if task.multiple_input else task.doc_to_target(sample["doc"])
    size = lambda context, continuation: len((context[len(context.rstrip()) :] + continuation).encode())
    return max((float(sample["filtered_resps"][g][0]), size(*sample["arguments"][g])) for g in (gold if isinstance(gold, list) else [gold]))


def run_suite(lm, metrics: dict[str, str], tasks: dict, limit: int | None) -> dict:
    """The tasks' scores, errors and per-item outcomes: {"tasks", "mean" (points), "mean_stderr", "items", "items_sha256", "gold_nll"}."""
    from lm_eval import evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        for task in tasks.values():
            task.set_config(key="num_fewshot", value=0)
        got = evaluate(lm, {"tasks": tasks}, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=True)
    out: dict = {"tasks": {}, "items": {}, "items_sha256": {}, "gold_nll": {}}
    for name, metric in metrics.items():
        task, scores, samples = tasks[name], got["results"][name], sorted(got["samples"][name], key=lambda s: s["doc_id"])
        metric = metric or ("acc" if "acc" in task._metric_fn_list else next(iter(task._metric_fn_list)))
        found = {k.split(",")[0]: v for k, v in scores.items() if "," in k and isinstance(v, (int, float))}
        of = {"metric": metric, "value": found.pop(metric), "stderr": found.pop(f"{metric}_stderr", None), "n": len(samples), "version": got["versions"][name]}
        if task.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):  # there is a right continuation, and an outcome an item
            gold = [-ll / max(1, size) for ll, size in (right_answer(task, s) for s in samples)]
            of["gold_nll"], out["gold_nll"][name] = sum(gold) / len(gold), [round(g, 4) for g in gold]
            out["items"][name] = "".join(str(int(s[metric])) for s in samples) if metric.startswith("acc") else None
        out["tasks"][name] = of | found
        out["items_sha256"][name] = hashlib.sha256("".join(s["doc_hash"] for s in samples).encode()).hexdigest()
    values, errors = [t["value"] for t in out["tasks"].values()], [t["stderr"] or 0.0 for t in out["tasks"].values()]
    return out | {"mean": 100 * sum(values) / len(values), "mean_stderr": 100 * math.sqrt(sum(e**2 for e in errors)) / len(errors)}


# ---- val --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_val(model: Transformer, cfg: Config, device, dtype) -> dict:
    """The loss sum of every full val window (nats, fp32 losses summed in fp64), the mean, and bits per byte of the text."""
    manifest, _, val = guard.open_data(guard.HERE / cfg.data)
    sums, n = {}, n_windows(len(val), cfg.window)
    for i in tqdm(range(0, n, cfg.micro_batch)[RANK::WORLD], desc="val windows", unit="batch", delay=5, leave=False, disable=RANK > 0):
        ids = range(i, min(n, i + cfg.micro_batch))
        x, y = fetch(val, np.array(ids), cfg.window, device)
        with autocast(device, dtype):
            loss = model(x, y, "none")
        sums |= zip(ids, loss.cpu().double().sum(1).tolist())
    merged = gathered(sums)
    mean = math.fsum(merged.values()) / (n * cfg.window)
    bits = mean / math.log(2) * manifest["val"]["tokens"] / manifest["val"]["text_bytes"]
    return {
        "loss": mean, "bits_per_byte": bits, "tokens_per_window": cfg.window, "sha256": manifest["val"]["sha256"],
        "loss_sums": [round(merged[i], 4) for i in range(n)],
    }  # fmt: skip


# ---- one checkpoint ---------------------------------------------------------------------------------------------------


def record_path(path: str, n_loop: int = 0) -> Path:
    """evals/<rung>/<run>_<best|final>.json of a checkpoint at out/<rung>/<run>/<best|final>.pt; ..._loop<K>.json at another number of loops."""
    p = Path(os.path.abspath(path))
    if p.parent.parent.parent != guard.HERE / "out" or p.stem not in ("best", "final"):
        raise Refusal(f"{path}: only out/<rung>/<run>/best.pt and final.pt have a place in evals/; for others give --limit, --tasks or --sample")
    return guard.HERE / "evals" / p.parent.parent.name / f"{p.parent.name}_{p.stem}{f'_loop{n_loop}' if n_loop else ''}.json"


def is_recorded(path: str, n_loop: int) -> bool:
    """Whether evals/ already holds this very checkpoint, by the sha256 that the results file says; the checkpoint may be gone."""
    record = record_path(path, n_loop)
    result = guard.HERE / "results" / record.parent.name / f"{Path(os.path.abspath(path)).parent.name}.json"
    if not (record.exists() and result.exists()):
        return False
    entry = guard.read_json(result)[Path(path).stem]
    return bool(entry) and guard.read_json(record)["checkpoint_sha256"] == entry["sha256"]


def registered_tasks(rung: str, only: str | None) -> dict[str, str]:
    """{task: metric} of a rung's bars file, or of the comma-separated names ("" where it has none: the task's own first)."""
    metrics = guard.read_json(guard.HERE / "config" / f"bars_{rung}.json")["tasks"]
    if only is None and not metrics:
        raise Refusal(f"rung {rung} has no suite (config/bars_{rung}.json): name one, --suite=1b, or tasks, --tasks=hellaswag,piqa")
    return metrics if only is None else {t: metrics.get(t, "") for t in only.split(",")}


def print_scores(name: str, out: dict) -> None:
    say(f"{name}: {len(out['tasks'])} tasks, zero-shot")
    shares = all(t["metric"].startswith(("acc", "exact_match")) for t in out["tasks"].values())
    for task, t in out["tasks"].items():
        error = "" if t["stderr"] is None else f" +- {(100 if shares else 1) * t['stderr']:.2f}"
        gold = f"  right answer {t['gold_nll']:.4f} nats a byte" if "gold_nll" in t else ""
        say(f"  {task:16} {t['metric']:8} {(100 if shares else 1) * t['value']:6.2f}{error}{gold}  (n={t['n']:,})")
    if shares:
        say(f"  {'mean':25} {out['mean']:6.2f} +- {out['mean_stderr']:.2f}")


def tokenizer_of(cfg: Config):
    return get_tokenizer(guard.read_json(guard.HERE / cfg.data / "manifest.json")["tokenizer"])


def evaluate_checkpoint(path: str, args) -> None:
    """Score one checkpoint; print the table; write the record unless only a part or another suite was asked for."""
    partial = args.tasks is not None or args.limit is not None or args.suite is not None
    if not partial and is_recorded(path, args.n_loop):
        say(f"{record_path(path, args.n_loop).relative_to(guard.HERE)}: done already")
        return
    start, device, cfg = time.perf_counter(), args.torch_device, peek(path)
    metrics, tok = registered_tasks(args.suite or cfg.rung, args.tasks), tokenizer_of(cfg)
    tasks = find_tasks(list(metrics), guard.HERE / cfg.data)  # what is missing is said before gigabytes are read
    guard.open_data(guard.HERE / cfg.data)
    model, cfg, ckpt = load_model(path, device, args.n_loop)
    dtype = compute_dtype(cfg, device)
    lm = make_lm(model, tok, device, dtype, BATCH_TOKENS[device.type])
    out = run_suite(lm, metrics, tasks, args.limit)
    print_scores(f"{cfg.name} {Path(path).stem}{f' at n_loop = {args.n_loop}' if args.n_loop else ''}", out)
    if partial:
        return
    import lm_eval

    val = score_val(model, cfg, device, dtype)
    record = {
        "name": cfg.name, "arm": cfg.arm, "seed": cfg.seed, "tag": cfg.tag, "rung": cfg.rung, "checkpoint": Path(path).stem, "step": ckpt["step"],
        "n_loop": cfg.n_loop, "n_loop_trained": ckpt["config"]["n_loop"], "checkpoint_sha256": guard.sha256_file(path), **out, "limit": args.limit,
        "truncated_continuations": lm.truncated, "val": val,
        "batch_policy": {
            "order": "longest first", "batch_tokens": BATCH_TOKENS[device.type], "shared_contexts": f"read once, continuations in packs of {PACK}", "dtype": str(dtype).removeprefix("torch."),
            "device": guard.device_identity(device)["name"],
        },
        "code_sha256": hashlib.sha256(b"".join((guard.HERE / name).read_bytes() for name in ("eval.py", "model.py"))).hexdigest(), "world_size": WORLD, "lm_eval": lm_eval.__version__, "versions": guard.versions(), "sec": time.perf_counter() - start,
    }  # fmt: skip
    if RANK == 0:
        guard.write_json(record_path(path, args.n_loop), record)
    where = record_path(path, args.n_loop).relative_to(guard.HERE)
    say(f"{where}: val {val['loss']:.4f} nats, {val['bits_per_byte']:.4f} bits a byte, {record['sec']:.0f} s")


def build_hf(name: str, cfg: Config, weights: dict, device: torch.device) -> Transformer:
    try:
        return build(cfg, weights, device)
    except ValueError as e:
        raise Refusal(f"{name}: its tensors are not of the sizes its config.json says ({e})") from None


def evaluate_hf(name: str, args) -> None:
    """Score a Llama-family folder or hub name through our model; prints, records nothing."""
    device, metrics = args.torch_device, registered_tasks(args.suite or "1b", args.tasks)
    cfg, weights, tok = hf.load(name)  # first: local tasks make the libraries believe that they are offline
    tasks = find_tasks(list(metrics), guard.HERE / args.data)
    model, dtype = build_hf(name, cfg, weights, device), compute_dtype(cfg, device)
    lm = make_lm(model, tok, device, dtype, BATCH_TOKENS[device.type])
    out = run_suite(lm, metrics, tasks, args.limit)
    print_scores(f"{name} ({model.counts()['stored']:,} parameters)", out)


def sample(path: str, args) -> None:
    if path == args.from_hf:
        cfg, weights, tok = hf.load(path)
        model = build_hf(path, cfg, weights, args.torch_device)
    else:
        model, cfg, _ = load_model(path, args.torch_device, args.n_loop)
        tok = tokenizer_of(cfg)
    ids = tok.encode(args.sample) or [tok.eot or 0]  # bits have no EOT
    new = continue_tokens(model, ids, args.max_new, tok.eot, tok.vocab_size, args.torch_device, compute_dtype(cfg, args.torch_device))
    say(args.sample + tok.decode(new))


# ---- data sets --------------------------------------------------------------------------------------------------------


def cache(args) -> None:
    """Download what a suite needs: its data sets into the hub's cache, GPT-2's files into tiktoken's."""
    names = list(registered_tasks(args.suite or "1b", args.tasks))
    if odd := [n for n in names if n not in TASK_FILES]:
        raise Refusal(f"{odd[0]}: not one of {', '.join(TASK_FILES)}, whose data sets are known here")
    if why := hub_down():
        raise Refusal(f"--cache: the hub cannot be asked ({why}); run it where there is network")
    from datasets import load_dataset

    for name in names:
        repo, part = hub_dataset(name)
        try:
            sizes = {split: len(rows) for split, rows in load_dataset(repo, part).items()}
        except Exception as e:  # noqa: BLE001, whatever datasets and the hub raise
            raise Refusal(f"task {name}: {repo} cannot be downloaded ({type(e).__name__}: {hf.first_line(e)}); try again where there is network") from None
        print(f"{name}: {repo} {sizes}")
    get_tokenizer("gpt2")
    print(
        f"gpt2: vocab.bpe, encoder.json\ndata sets in {hub_home()}; GPT-2's files in {tiktoken_folder()}: copy both, or set HF_HOME and TIKTOKEN_CACHE_DIR to where they are"
    )


def gram_hashes(ids: np.ndarray, n: int) -> np.ndarray:
    """uint64 hash of every n-gram of ids (m,): a polynomial modulo 2^64, spread by a multiply and a shift."""
    h = np.zeros(max(0, len(ids) - n + 1), dtype=np.uint64)
    for j in range(n):
        h = h * np.uint64(0x9E3779B97F4A7C15) + ids[j : j + len(h)].astype(np.uint64) + np.uint64(1)
    h ^= h >> np.uint64(29)
    return h * np.uint64(0xBF58476D1CE4E5B9)


def grams_in_train(train: np.ndarray, wanted: np.ndarray, n: int, chunk: int = 1 << 22) -> np.ndarray:
    """Which of the sorted hashes `wanted` are those of an n-gram of train (bool). A table of their top 27 bits spares nearly all the searching."""
    bitmap, found = np.zeros(1 << 27, dtype=bool), np.zeros(len(wanted), dtype=bool)
    bitmap[wanted >> np.uint64(37)] = True
    for i in tqdm(range(0, len(train), chunk), desc="train", unit="chunk", delay=5, leave=False, disable=False):
        h = gram_hashes(train[i : i + chunk + n - 1], n)
        h = h[bitmap[h >> np.uint64(37)]]
        at = np.minimum(np.searchsorted(wanted, h), len(wanted) - 1)
        found[at[wanted[at] == h]] = True
    return found


def overlap(args) -> None:
    """Share of each task's items, and of their n-grams, that stand in the training set. Context and continuations of an item alike; a report of its own."""
    folder = guard.HERE / args.data
    manifest, train, _ = guard.open_data(folder)
    tok, n = get_tokenizer(manifest["tokenizer"]), GRAM.get(manifest["tokenizer"], 13)
    metrics, items = registered_tasks(args.suite or "1b", args.tasks), {}
    for name, task in find_tasks(list(metrics), folder).items():
        task.build_all_requests(limit=args.limit, rank=0, world_size=1)
        grams = defaultdict(list)
        for instance in task.instances:
            grams[instance.doc_id].append(gram_hashes(np.array(tok.encode("".join(instance.args[:2])), dtype=np.uint16), n))
        items[name] = [np.unique(np.concatenate(g)) for g in grams.values()]
    wanted = np.unique(np.concatenate([g for docs in items.values() for g in docs]))
    found = wanted[grams_in_train(train, wanted, n)] if len(wanted) else wanted
    report = {}
    print(f"{n}-grams of {tok.name} tokens in {args.data}/train.bin ({len(train):,} tokens)")
    for name, docs in items.items():
        hits = [np.isin(g, found).mean() if len(g) else 0.0 for g in docs]
        report[name] = {
            "items": len(docs),
            "items_with_a_match": int(np.count_nonzero(hits)),
            "items_mostly_matched": int(np.count_nonzero(np.array(hits) > 0.5)),
            "share_of_grams": float(np.mean(hits)),
        }
        r = report[name]
        print(
            f"  {name:16} {r['items_with_a_match']:6,} of {r['items']:6,} items share one ({r['items_with_a_match'] / r['items']:.1%}), {r['items_mostly_matched']:,} share over half; {r['share_of_grams']:.2%} of all"
        )
    if args.limit is None:
        path = guard.HERE / "evals" / f"overlap_{Path(args.data).name}.json"
        guard.write_json(path, {"data": args.data, "train_sha256": manifest["train"]["sha256"], "tokenizer": tok.name, "n": n, "tasks": report})
        print(path.relative_to(guard.HERE))


def parse(argv: list[str]):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoints", nargs="*", metavar="CKPT")
    p.add_argument("--tasks", help="comma-separated; default: the tasks of the rung's bars file; prints only")
    p.add_argument("--suite", metavar="RUNG", help="the tasks of another rung's bars file; prints only")
    p.add_argument("--limit", type=int, help="items a task, for a look")
    p.add_argument("--n_loop", type=int, default=0, help="loops of a looped model, other than trained; recorded apart, never the verdict's")
    p.add_argument("--from_hf", metavar="DIR_OR_NAME", help="score a Llama-family model instead of a checkpoint; prints only")
    p.add_argument("--sample", metavar="TEXT", help="continue TEXT instead of scoring")
    p.add_argument("--max_new", type=int, default=200, help="tokens to sample at most")
    p.add_argument("--cache", action="store_true", help="download the suite's data sets and GPT-2's files")
    p.add_argument("--overlap", action="store_true", help="n-grams of the suite's items in the training set of --data")
    p.add_argument("--data", default="data/1b", help="for --overlap and --from_hf: a data folder")
    p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    args = p.parse_args(argv)
    if args.tasks == "" or (args.limit is not None and args.limit < 2) or args.n_loop < 0:
        p.error("--tasks wants a name, --limit at least 2 items, --n_loop at least 1")
    if bool(args.checkpoints) + bool(args.from_hf) + args.cache + args.overlap != 1:
        p.error("one of: checkpoints, --from_hf, --cache, --overlap")
    if args.n_loop and args.from_hf:
        p.error("--n_loop is for checkpoints of this project")
    if WORLD > 1 and (args.cache or args.overlap):
        p.error("--cache and --overlap are for one process")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.cache or args.overlap:
        return cache(args) if args.cache else overlap(args)
    args.torch_device = setup_device(argparse.Namespace(device=args.device, timeout_min=60))
    for path in dict.fromkeys(args.checkpoints or [args.from_hf]):
        if args.sample is not None:
            sample(path, args)
        else:
            evaluate_hf(path, args) if args.from_hf else evaluate_checkpoint(path, args)
        gc.collect()  # a class made in a function, as make_lm's, holds its model in a cycle


if __name__ == "__main__":
    main()
    train.leave(0)
