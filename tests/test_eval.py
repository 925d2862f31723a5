"""eval.py against brute force, and against train.py's own val loss."""

import json
import math
import shutil
import types

import numpy as np
import pytest
import torch

import guard
from eval import continue_tokens, gram_hashes, load_model, make_lm, parse, peek, plan_batches, score_tokens
from model import Transformer
from prepare import ByteTokenizer
from train import Config, n_windows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data):
    """A project with a trained tiny L, scored by the real eval.py."""
    from project import Project

    p = Project(tmp_path_factory.mktemp("trained"))
    shutil.copytree(tiny_data, p.path / "data" / "tiny")
    p.ok("train.py", *p.tiny("L", "--max_steps=200", "--eval_every=40", "--lr=5e-3", "--window=64"))
    p.output = p.ok("eval.py", "out/nano/L_s0_t/best.pt", "out/nano/L_s0_t/final.pt")
    return p


@pytest.fixture(scope="module")
def model(trained):
    return load_model(str(trained.path / "out/nano/L_s0_t/best.pt"), CPU)[0]


def brute(model, context: list[int], target: list[int]) -> tuple[float, bool]:
    """One sequence, its whole log-softmax in fp64, summed over the target's tokens."""
    T = model.c.window
    ids = (context + target)[-T - 1 :]
    kept = target[-T:]
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids[:-1]])).double(), -1)[0]
    at = range(len(ids) - 1 - len(kept), len(ids) - 1)
    return sum(logp[i, ids[i + 1]].item() for i in at), all(logp[i].argmax().item() == ids[i + 1] for i in at)


def requests(pairs):
    return [types.SimpleNamespace(args=pair) for pair in pairs]


def test_loglikelihood_equals_brute_force(model, trained):
    tok, rng = ByteTokenizer(), np.random.RandomState(0)
    text = bytes((np.fromfile(trained.path / "data/tiny/val.bin", dtype="<u2")[:3000] % 256).astype(np.uint8)).decode(errors="replace")
    pairs = [
        ("", "empty context"),
        ("  ", "spaces alone"),
        ("trailing space ", "word"),
        ("é🦊", " naïve"),
        ("x" * 200, "long context"),
        ("short", "y" * 100),
        ("a", "b"),
    ]
    for i in range(193):  # of every three, two share their context
        n, m = rng.randint(1, 120), rng.randint(1, 40)
        context = pairs[-1][0] if i % 3 == 2 else text[(at := rng.randint(2000)) : at + n]
        pairs.append((context, text[at + 200 + i : at + 200 + i + m]))
    lm = make_lm(model, tok, CPU, torch.float32, 1000)
    got = lm.loglikelihood(requests(pairs), disable_tqdm=True)
    for (context, target), (score, greedy) in zip(pairs, got, strict=True):
        spaces = len(context) - len(context.rstrip())  # lm-eval scores a context's trailing spaces with the continuation
        context, target = context[: len(context) - spaces], context[len(context) - spaces :] + target
        want = brute(model, tok.encode(context) or [tok.eot], tok.encode(target))
        assert score == pytest.approx(want[0], abs=1e-4)
        assert greedy == want[1]
    assert lm.truncated == 1
    assert any(greedy for _, greedy in got)


def test_batch_size_moves_no_score(model):
    rng = np.random.RandomState(1)
    pairs = []
    for _ in range(40):
        ids = rng.randint(256, size=rng.randint(5, 60)).tolist()
        pairs.append((ids[:-1], ids[-rng.randint(1, 4) :]))
    one, many = (score_tokens(model, pairs, CPU, torch.float32, n) for n in (1, 4096))
    assert [a[0] for a in one] == pytest.approx([b[0] for b in many], abs=1e-4)


def test_rolling_scores_every_token_once(model):
    tok = ByteTokenizer()
    for text in ("a", "x = 1\n" * 50, "é" * 70):
        ids = tok.encode(text)
        want = 0.0
        for start in range(0, len(ids), model.c.window):  # disjoint windows; the last one looks back over a full context
            part = ids[start : start + model.c.window]
            context = ([tok.eot] + ids)[: start + 1] if start else [tok.eot]
            want += brute(model, context[-(model.c.window + 1 - len(part)) :], part)[0]
        got = make_lm(model, tok, CPU, torch.float32, 1000).loglikelihood_rolling(requests([(text,)]))[0]
        assert got == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("changes", [{}, {"loop_order": "stack"}, {"n_kv_head": 2}, {"n_loop": 1, "eps": 1.0}], ids=["layer", "stack", "grouped", "V"])
def test_cache_equals_whole_sequences(changes):
    """Shared contexts of ragged lengths, read once, against one sequence at a time: every way to loop, grouped heads too."""
    c = Config(**{"vocab_size": 61, "n_layer": 3, "n_loop": 2, "eps": 0.3, "n_embd": 32, "n_head": 4, "ffn_hidden": 48, "window": 40} | changes)
    model, rng = Transformer(c), np.random.RandomState(0)
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():  # away from the init, where attention is nearly flat
            p.add_(0.15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    pairs = []
    for _ in range(12):
        context = rng.randint(61, size=rng.randint(1, 30)).tolist()
        pairs += [(context, rng.randint(61, size=rng.randint(1, 20)).tolist()) for _ in range(rng.randint(1, 5))]
    asked = [((context + target)[-c.window - 1 : -1], target) for context, target in pairs]
    assert any(rest for batch in plan_batches(asked, 100) for _, requests in batch for _, rest in requests)
    for size in (1, 100, 10_000):
        got = score_tokens(model, asked, CPU, torch.float32, size)
        for (context, target), (score, greedy) in zip(pairs, got, strict=True):
            assert (pytest.approx(score, abs=1e-4), greedy) == brute(model, context, target)
    text = continue_tokens(model, pairs[0][0], 60, None, 61, CPU, torch.float32)
    want = list(pairs[0][0])
    for _ in range(60):
        with torch.no_grad():
            want.append(model(torch.tensor([want[-c.window :]]))[0, -1].argmax().item())
    assert pairs[0][0] + text == want


def test_rolling_tasks_by_the_script_and_what_cannot_be_generated(trained, model):
    """A perplexity task prints its own metric; a text that leaves no room for its prompt is refused, not scored without it."""
    tasks = trained.path / "data/tiny/tasks"
    (tasks / "prose.yaml").write_text(
        'task: prose\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - {metric: bits_per_byte}\nmetadata: {version: 1.0}\n"
    )
    texts = ["import os, sys\n" * 9, "def f(x):\n    return x\n" * 5]
    (tasks / "prose.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    out = trained.ok("eval.py", "out/nano/L_s0_t/best.pt", "--tasks=prose,cloze", "--limit=2")
    lm = make_lm(model, ByteTokenizer(), CPU, torch.float32, 1000)
    bits = -sum(lm.loglikelihood_rolling(requests([(t,) for t in texts]))) / sum(map(len, texts)) / math.log(2)
    assert f"bits_per_byte {bits:6.2f}" in out
    with pytest.raises(guard.Refusal, match="within the window of 64"):
        lm.generate_until(requests([("a", {"until": ["b"]})]))
    with pytest.raises(guard.Refusal, match="greedily"):
        lm.generate_until(requests([("a", {"until": ["b"], "max_gen_toks": 3, "do_sample": True, "temperature": 0.7})]))


def test_a_shared_context_is_read_once():
    pairs = [([1, 2, 3, 4, 5], [4, 5, 6]), ([1, 2, 3, 7], [7, 8]), ([1, 2, 3], [9]), ([1, 2, 9], [9, 9])]
    assert plan_batches(pairs, 100) == [[([1, 2, 3], [(0, [4, 5]), (1, [7]), (2, [])]), ([1, 2, 9], [(3, [])])]]


def test_greedy_generation(model):
    tok, ids = ByteTokenizer(), list(b"def f(self")
    want = list(ids)
    for _ in range(80):  # past the window of 64
        with torch.no_grad():
            want.append(model(torch.tensor([want[-model.c.window :]]))[0, -1, :257].argmax().item())
        if want[-1] == tok.eot:
            want.pop()
            break
    assert ids + continue_tokens(model, ids, 80, tok.eot, 257, CPU, torch.float32) == want
    lm = make_lm(model, tok, CPU, torch.float32, 1000)
    text = lm.generate_until(requests([("def f(self", {"until": ["\n\n"], "max_gen_toks": 40})]))[0]
    assert text == tok.decode(want[len(ids) :][:40]).split("\n\n")[0] != ""


def test_record(trained):
    run = json.loads((trained.path / "results/nano/L_s0_t.json").read_text())
    manifest = json.loads((trained.path / "data/tiny/manifest.json").read_text())
    for kind in ("best", "final"):
        e = json.loads((trained.path / f"evals/nano/L_s0_t_{kind}.json").read_text())
        assert e["checkpoint_sha256"] == run[kind]["sha256"] == guard.sha256_file(trained.path / f"out/nano/L_s0_t/{kind}.pt")
        assert e["val"]["loss"] == pytest.approx(run[kind]["val_loss"], abs=1e-4)
        n = n_windows(6000, 64)
        assert len(e["val"]["loss_sums"]) == n
        assert sum(e["val"]["loss_sums"]) / (n * 64) == pytest.approx(e["val"]["loss"], abs=1e-5)
        assert e["val"]["bits_per_byte"] == pytest.approx(e["val"]["loss"] / math.log(2) * 6000 / manifest["val"]["text_bytes"])
        values = []
        for name, task in e["tasks"].items():
            assert task["n"] == len(e["items"][name]) == 500
            assert task["value"] == pytest.approx(e["items"][name].count("1") / 500)
            assert task["stderr"] == pytest.approx(math.sqrt(task["value"] * (1 - task["value"]) / 499), abs=1e-9)
            values.append(task["value"])
        for task, nlls in e["gold_nll"].items():
            assert len(nlls) == 500
            assert sum(nlls) / 500 == pytest.approx(e["tasks"][task]["gold_nll"], abs=1e-4)
        assert (e["n_loop"], e["n_loop_trained"], e["world_size"]) == (2, 2, 1)
        assert e["mean"] == pytest.approx(100 * sum(values) / 2)
        assert e["limit"] is None
        assert isinstance(e["tasks"]["lastword"]["perplexity_stderr"], float)


def test_cloze_outcomes_equal_brute_force(trained, model):
    tok = ByteTokenizer()
    e = json.loads((trained.path / "evals/nano/L_s0_t_best.json").read_text())
    items = [json.loads(line) for line in (trained.path / "data/tiny/tasks/cloze.jsonl").read_text().splitlines()]
    for item, outcome in list(zip(items, e["items"]["cloze"], strict=True))[:60]:
        scores = [brute(model, tok.encode(item["context"]), tok.encode(c))[0] for c in item["choices"]]
        assert int(np.argmax(scores) == item["gold"]) == int(outcome)
    gold = []
    for item in items[:20]:  # spaces at a context's end belong to the continuation
        context = item["context"].rstrip()
        answer = tok.encode(item["context"][len(context) :] + item["choices"][item["gold"]])
        gold.append(-brute(model, tok.encode(context), answer)[0] / len(answer))
    assert e["gold_nll"]["cloze"][:20] == pytest.approx(gold, abs=2e-4)


def test_ranks_move_no_score(trained):
    """Two ranks write what one wrote; three share two items; a sample is the same from both."""
    path = trained.path / "evals/nano/L_s0_t_final.json"
    one = json.loads(path.read_text())
    path.unlink()
    out = trained.ok("eval.py", "out/nano/L_s0_t/final.pt", ranks=2)
    two = json.loads(path.read_text())
    assert (two.pop("world_size"), one.pop("world_size")) == (2, 1)
    assert {k: v for k, v in one.items() if k != "sec"} == {k: v for k, v in two.items() if k != "sec"}
    assert out.count("mean") == 1, "one rank speaks"
    assert "(n=2)" in trained.ok("eval.py", "out/nano/L_s0_t/final.pt", "--tasks=cloze", "--limit=2", ranks=3)
    assert trained.ok("eval.py", "out/nano/L_s0_t/final.pt", "--sample=def f(", "--max_new=30", ranks=2) == trained.ok(
        "eval.py", "out/nano/L_s0_t/final.pt", "--sample=def f(", "--max_new=30"
    )


def test_another_number_of_loops_is_recorded_apart(trained):
    before = (trained.path / "evals/nano/L_s0_t_best.json").read_bytes()
    trained.ok("eval.py", "out/nano/L_s0_t/best.pt", "--n_loop=3")
    assert (trained.path / "evals/nano/L_s0_t_best.json").read_bytes() == before
    e = json.loads((trained.path / "evals/nano/L_s0_t_best_loop3.json").read_text())
    assert (e["n_loop"], e["n_loop_trained"]) == (3, 2)
    assert e["val"]["loss"] != json.loads(before)["val"]["loss"]
    model, cfg, _ = load_model(str(trained.path / "out/nano/L_s0_t/best.pt"), CPU, 3)
    assert (model.blocks[0].n_loop, model.blocks[0].eps) == (3, cfg.eps) == (3, pytest.approx(1 / (2 * math.sqrt(3))))


def test_overlap_equals_sets_of_grams(trained):
    """A task item copied out of train is found, and the counts are those of plain Python sets."""
    train = bytes((np.fromfile(trained.path / "data/tiny/train.bin", dtype="<u2") % 256).astype(np.uint8))
    folder = trained.path / "data/over"
    shutil.copytree(trained.path / "data/tiny", folder)
    items = [json.loads(line) for line in (folder / "tasks/cloze.jsonl").read_text().splitlines()][:30]
    copied = train[1000:1200].decode("ascii")
    items[3] |= {"context": copied[:90], "choices": [copied[90:120], *items[3]["choices"][1:]], "gold": 0}
    items[5] |= {"context": items[5]["context"][:50] + copied[:70]}
    (folder / "tasks/cloze.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    out = trained.ok("eval.py", "--overlap", "--suite=nano", "--tasks=cloze", "--data=data/over")
    r = json.loads((trained.path / "evals/overlap_over.json").read_text())
    known = {train[i : i + 64] for i in range(len(train) - 63)}
    shares = []
    for item in items:
        texts = [(item["context"] + c).encode() for c in item["choices"]]
        grams = {t[i : i + 64] for t in texts for i in range(len(t) - 63)}
        shares.append(len(grams & known) / len(grams))
    assert (r["n"], r["tasks"]["cloze"]["items"]) == (64, 30)
    assert r["tasks"]["cloze"]["items_with_a_match"] == sum(s > 0 for s in shares) >= 2
    assert r["tasks"]["cloze"]["items_mostly_matched"] == sum(s > 0.5 for s in shares)
    assert r["tasks"]["cloze"]["share_of_grams"] == pytest.approx(np.mean(shares))
    assert "cloze" in out
    ids = np.random.RandomState(0).randint(65536, size=5000).astype(np.uint16)
    grams = [tuple(ids[i : i + 13]) for i in range(len(ids) - 12)]
    assert len(np.unique(gram_hashes(ids, 13))) == len(set(grams))


def test_missing_data_sets_and_tokenizers_are_named_at_once(trained):
    """Nothing answers at the hub's address: the task, the data set and what to do, before lm-eval is even imported."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(trained.path / "empty"), "HF_HUB_OFFLINE": "0"}
    line = trained.refused("eval.py", "out/nano/L_s0_t/best.pt", "--suite=1b", env=env)
    assert all(word in line for word in ("hellaswag", "Rowan/hellaswag", str(trained.path / "empty"), "run.sh cache", "refused"))
    assert "super_glue (boolq)" in trained.refused("eval.py", "out/nano/L_s0_t/best.pt", "--suite=1b", "--tasks=boolq", env=env)
    assert "rung flip has no suite" in trained.refused("eval.py", "out/nano/L_s0_t/best.pt", "--suite=flip", env=env)
    assert "no such folder" in trained.refused("eval.py", "--from_hf=no/such", "--tasks=cloze", "--data=data/tiny", env=env)


def test_done_evals_are_skipped_and_bad_input_refused(trained):
    path = trained.path / "evals/nano/L_s0_t_best.json"
    before = path.read_bytes()
    assert "done already" in trained.ok("eval.py", "out/nano/L_s0_t/best.pt")
    assert "cloze" in trained.ok("eval.py", "out/nano/L_s0_t/best.pt", "--tasks=cloze", "--limit=5")
    assert path.read_bytes() == before
    good = (trained.path / "out/nano/L_s0_t/final.pt").read_bytes()
    folder = trained.path / "out/nano/broken"
    folder.mkdir()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    for body, word in (
        (b"", "not a whole checkpoint"),
        (good[: len(good) // 2], "not a whole checkpoint"),
        (bytes(flipped), "damaged"),
        (b"PK no zip", "not a whole"),
    ):
        (folder / "best.pt").write_bytes(body)
        with pytest.raises(guard.Refusal, match=word):
            peek(str(folder / "best.pt")) if word != "damaged" else load_model(str(folder / "best.pt"), CPU)
    torch.save({"model": {"w": torch.zeros(3)}, "config": {"n_layer": 2}, "step": 1}, folder / "best.pt")
    assert "not a checkpoint of this model" in trained.refused("eval.py", "out/nano/broken/best.pt")
    assert "no such checkpoint" in trained.refused("eval.py", "out/nano/none/best.pt")
    for option in ("--limit=1", "--limit=0", "--tasks=", "--cache", "--from_hf=x", "--n_loop=-1"):
        with pytest.raises(SystemExit, match="2"):
            parse(["out/nano/L_s0_t/best.pt", option])
    assert 'unknown task "nosuch"' in trained.refused("eval.py", "out/nano/L_s0_t/best.pt", "--tasks=nosuch")
    assert "whole" in trained.ok("guard.py", "out/nano/L_s0_t/best.pt")
