"""eval.py against brute force, and against train.py's own val loss."""

import json
import math
import types

import numpy as np
import pytest
import torch

import guard
from eval import continue_tokens, load_model, make_lm, score_tokens
from prepare import ByteTokenizer
from train import n_windows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data):
    """A project with a trained tiny L, scored by the real eval.py."""
    import shutil

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
    for _ in range(193):
        at, n, m = rng.randint(2000), rng.randint(1, 120), rng.randint(1, 40)
        pairs.append((text[at : at + n], text[at + n : at + n + m]))
    lm = make_lm(model, tok, CPU, torch.float32, 1000)
    got = lm.loglikelihood(requests(pairs), disable_tqdm=True)
    for (context, target), (score, greedy) in zip(pairs, got, strict=True):
        spaces = len(context) - len(context.rstrip())  # lm-eval scores a context's trailing spaces with the continuation
        context, target = context[: len(context) - spaces], context[len(context) - spaces :] + target
        want = brute(model, tok.encode(context) or [tok.eot], tok.encode(target))
        assert score == pytest.approx(want[0], abs=1e-4 * max(1, len(target)))
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
        assert got == pytest.approx(want, abs=1e-4 * len(ids))


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
    assert tok.decode(want[len(ids) :]).startswith(text)
    assert "\n\n" not in text


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
    for body, word in ((b"", "not a whole checkpoint"), (good[: len(good) // 2], "not a whole checkpoint"), (bytes(flipped), "damaged")):
        (folder / "best.pt").write_bytes(body)
        assert word in trained.refused("eval.py", "out/nano/broken/best.pt")
    torch.save({"model": {"w": torch.zeros(3)}, "config": {"n_layer": 2}, "step": 1}, folder / "best.pt")
    assert "not a checkpoint of this model" in trained.refused("eval.py", "out/nano/broken/best.pt")
    assert "no such checkpoint" in trained.refused("eval.py", "out/nano/none/best.pt")
    (folder / "best.pt").write_bytes(b"PK not a zip")
    assert "not a whole checkpoint" in trained.refused("eval.py", "out/nano/broken/best.pt")
    for option in ("--limit=1", "--limit=0", "--tasks="):
        assert trained.run("eval.py", "out/nano/L_s0_t/best.pt", option).returncode == 2
    assert 'unknown task "nosuch"' in trained.refused("eval.py", "out/nano/L_s0_t/best.pt", "--tasks=nosuch")
    assert "whole" in trained.ok("guard.py", "out/nano/L_s0_t/best.pt")
