"""Corpora -> uint16 token bins and a manifest: data/<name>/{train.bin,val.bin,manifest.json}.

    python prepare.py stdlib --out=data/nano --tokens=32000 --val_tokens=150000 --suite     # the standard library's sources, as bytes
    python prepare.py files 'corpus/**/*.jsonl' --out=data/mine --tokens=12500000 --val_tokens=1000000 --tokenizer=gpt2

Documents go in a seeded order; the first ones are val (whole documents, cut at exactly --val_tokens), the rest train (cut at exactly
--tokens). Exact duplicates are dropped, so no val document is in train. --suite makes two lm-eval tasks from the val documents.
A .txt (or other) file is one document; a .jsonl file has one a line, under "text". Nothing is left behind when it fails.
"""

import argparse
import glob
import hashlib
import json
import platform
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import guard
from guard import Refusal

SUITE_ITEMS = 500  # items of each task made from the held-out documents
TRIES = 10_000  # draws for one item before a text is called unfit
CONTEXT, CONTINUATION = 88, 32  # characters of a cloze item: with EOT they fit a window of 128 bytes


# ---- documents --------------------------------------------------------------------------------------------------------


def stdlib_files() -> tuple[list[Path], str]:
    """Source files of the running Python's standard library, tests and site-packages left out, and what to call that source."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    return files, f"standard library of Python {platform.python_version()}"


def glob_files(patterns: list[str]) -> tuple[list[Path], str]:
    files = sorted({Path(f) for p in patterns for f in glob.glob(p, recursive=True) if Path(f).is_file()})
    if not files:
        raise Refusal(f"prepare.py: no file matches {' '.join(patterns)}")
    return files, "files " + " ".join(patterns)


def documents_of(path: Path) -> Iterator[str]:
    """The documents of one file, in order. Bytes that are no UTF-8 become U+FFFD."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)["text"].encode(errors="replace").decode()  # a lone surrogate becomes "?"
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
                raise Refusal(f'{path}:{number}: not a JSON object with a "text" ({type(e).__name__}: {e})') from None


def ordered_documents(files: list[Path], seed: int, seen: dict) -> Iterator[str]:
    """Non-empty documents, files in an order drawn from the seed, each exact text once; seen counts what was dropped."""
    digests = set()
    for i in np.random.RandomState(seed).permutation(len(files)):
        for text in documents_of(files[i]):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if not text or digest in digests:
                seen["duplicates" if text else "empty"] += 1
                continue
            digests.add(digest)
            yield text


# ---- tokenizers -------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """UTF-8 bytes are the tokens; EOT = 256."""

    name, vocab_size, eot = "byte", 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class BitTokenizer:
    """The bits of UTF-8 bytes, the most significant first; no EOT."""

    name, vocab_size, eot = "bits", 2, None

    def encode(self, text: str) -> list[int]:
        return np.unpackbits(np.frombuffer(text.encode(), dtype=np.uint8)).tolist()

    def decode(self, ids: list[int]) -> str:
        return np.packbits(np.array(ids[: len(ids) // 8 * 8], dtype=np.uint8)).tobytes().decode(errors="replace")


class GPT2Tokenizer:
    """tiktoken's gpt2; special text inside a document is text. EOT = 50256."""

    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self):
        import tiktoken

        try:
            self.bpe = tiktoken.get_encoding("gpt2")
        except Exception as e:  # noqa: BLE001, tiktoken lets through whatever requests or the file system raise
            where = (
                "TIKTOKEN_CACHE_DIR holding vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee and encoder.json as 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
            )
            raise Refusal(f"tiktoken cannot load gpt2 ({type(e).__name__}); offline it needs {where}") from None

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.vocab_size])


def get_tokenizer(name: str):
    """The tokenizer a manifest names; eval.py and prepare.py share it."""
    kinds = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer, "bits": BitTokenizer}
    if name not in kinds:
        raise Refusal(f'tokenizer "{name}" is unknown: one of {", ".join(kinds)}')
    return kinds[name]()


# ---- bins -------------------------------------------------------------------------------------------------------------


def write_split(path: Path, docs: Iterator[str], want: int, tok, report, keep: list | None = None) -> dict:
    """Write exactly `want` tokens of documents with EOT between them; returns the manifest's entry. Texts as written go to `keep`."""
    counts, packer, packed = {"documents": 0, "tokens": 0, "text_bytes": 0}, zlib.compressobj(), 0
    with open(path, "wb") as f:
        for text in docs:
            whole = tok.encode(text) + ([] if tok.eot is None else [tok.eot])
            ids = np.array(whole[: want - counts["tokens"]], dtype="<u2")
            text = text if len(ids) == len(whole) else tok.decode(ids.tolist())
            f.write(ids.tobytes())
            size = len(text.encode())
            packed += len(packer.compress(text.encode()))  # one stream, so that documents alike pack away
            if keep is not None:
                keep.append(text)
            counts = {"documents": counts["documents"] + 1, "tokens": counts["tokens"] + len(ids), "text_bytes": counts["text_bytes"] + size}
            report(counts["tokens"], want)
            if counts["tokens"] == want:
                break
    if counts["tokens"] < want:
        raise Refusal(f"prepare.py: the source holds {counts['tokens']:,} tokens for {path.name}, {want:,} were asked for; ask for less or add files")
    packed += len(packer.flush())
    return counts | {"sha256": guard.sha256_file(path), "zlib_ratio": packed / max(1, counts["text_bytes"])}


def progress(label: str):
    """report(done, want) -> a line on stderr at most twice a second."""
    start = last = time.perf_counter()

    def report(done: int, want: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > 0.5 or done == want:
            last = now
            rate = done / (now - start)
            print(
                f"\r{label}  {done / want:4.0%}  {done:,}/{want:,} tokens  {rate:,.0f} tok/s  ETA {(want - done) / rate:.0f}s ",
                end="\n" if done == want else "",
                file=sys.stderr,
            )

    return report


def prepare(args) -> None:
    """Make the whole folder beside its final place, check it, then move it there."""
    files, source = stdlib_files() if args.source == "stdlib" else glob_files(args.glob)
    tok = get_tokenizer(args.tokenizer)
    if tok.vocab_size > 65_536:
        raise Refusal(f"tokenizer {tok.name} has {tok.vocab_size:,} ids: a bin holds uint16, at most 65,536")
    out = Path(args.out).resolve()
    check_out(out, files)
    out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the temporary folder goes
    tmp = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        seen = {"duplicates": 0, "empty": 0}
        docs = ordered_documents(files, args.seed, seen)
        val = write_split(tmp / "val.bin", docs, args.val_tokens, tok, progress("val  "), keep := [] if args.suite else None)
        train = write_split(tmp / "train.bin", docs, args.tokens, tok, progress("train"))
        tokens = np.memmap(tmp / "train.bin", dtype="<u2", mode="r")
        manifest = {
            "source": source, "seed": args.seed, "tokenizer": tok.name, "vocab_size": tok.vocab_size, "eot": tok.eot, "train": train, "val": val,
            "zlib_ratio": train["zlib_ratio"], "commonest_share": guard.commonest_share(tokens), "distinct_ids": len(np.unique(tokens)),
            "exact_duplicates_dropped": seen["duplicates"], "empty_dropped": seen["empty"], "date": time.strftime("%Y-%m-%d"), "versions": guard.versions(),
        }  # fmt: skip
        guard.write_json(tmp / "manifest.json", manifest)
        guard.check_data(tmp, *guard.open_data(tmp), vocab_size=tok.vocab_size, window=args.window)
        if args.suite:
            write_suite(tmp / "tasks", keep, args.seed)
        replace_folder(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    ratio = manifest["zlib_ratio"]
    print(
        f"{args.out}: {train['tokens']:,} train and {val['tokens']:,} val tokens of {source}; {train['documents']} and {val['documents']} documents, zlib {ratio:.3f}"
    )


def check_out(out: Path, files: list[Path]) -> None:
    """Only a folder that prepare.py made, or none, may be replaced, and never one that the documents come from."""
    known = {"train.bin", "val.bin", "manifest.json", "tasks"}
    if out.exists() and not (out.is_dir() and {p.name for p in out.iterdir()} <= known):
        raise Refusal(f"{out}: exists and holds other things than prepare.py makes; give another --out")
    if inside := next((f for f in files if out in f.resolve().parents), None):
        raise Refusal(f"{out}: the source file {inside} lies in it; give another --out")


def replace_folder(new: Path, old: Path) -> None:
    """Put a finished folder in the old one's place; the old one stands until the new is whole."""
    new.chmod(0o755)
    aside = new.with_suffix(".old")
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


# ---- suite ------------------------------------------------------------------------------------------------------------


def write_suite(folder: Path, texts: list[str], seed: int) -> None:
    """cloze (which of 4 continuations follows) and lastword (predict the last word) from held-out documents, as lm-eval tasks."""
    rng = np.random.RandomState(seed)
    texts = [t for t in texts if len(t) >= 4 * (CONTEXT + CONTINUATION) and t.isascii()]
    if not texts:
        raise Refusal("prepare.py: no val document is long enough for a suite; raise --val_tokens")
    write_task(folder, "cloze", [cloze_item(texts, rng) for _ in range(SUITE_ITEMS)], CLOZE_YAML)
    write_task(folder, "lastword", [lastword_item(texts, rng) for _ in range(SUITE_ITEMS)], LASTWORD_YAML)


def cut(texts: list[str], rng, length: int) -> str:
    """`length` characters from a random place of a random document (the longer, the likelier)."""
    sizes = np.array([len(t) - length for t in texts], dtype=float)
    text = texts[rng.choice(len(texts), p=sizes / sizes.sum())]
    at = rng.randint(len(text) - length)
    return text[at : at + length]


def cloze_item(texts: list[str], rng) -> dict:
    passage = cut(texts, rng, CONTEXT + CONTINUATION)
    choices, gold = [passage[CONTEXT:]], int(rng.randint(4))
    for _ in range(TRIES):
        wrong = cut(texts, rng, CONTINUATION)
        if wrong not in choices and wrong.strip():
            choices.append(wrong)
        if len(choices) == 4:
            break
    else:
        raise Refusal("prepare.py: the val documents repeat themselves: no four different continuations for a cloze item; leave out --suite")
    choices[0], choices[gold] = choices[gold], choices[0]
    return {"context": passage[:CONTEXT], "choices": choices, "gold": gold}


def lastword_item(texts: list[str], rng) -> dict:
    """A passage whose last word is wanted: letters, two or more, after a space."""
    for _ in range(TRIES):
        words = cut(texts, rng, CONTEXT + CONTINUATION).split(" ")
        ends = [i for i, w in enumerate(words) if i and w.isalpha() and len(w) > 1]
        if ends and len(context := " ".join(words[: ends[-1]])) >= CONTEXT // 2:
            return {"context": context, "word": words[ends[-1]]}
    raise Refusal("prepare.py: the val documents hold hardly a word after a space: no lastword item; leave out --suite")


def write_task(folder: Path, name: str, items: list[dict], yaml: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / f"{name}.yaml").write_text(yaml)


# eval.py adds data_files, the .jsonl beside each .yaml: lm-eval would look from the working directory.
CLOZE_YAML = """task: cloze
dataset_path: json
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""
LASTWORD_YAML = """task: lastword
dataset_path: json
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' ' + word}}"
target_delimiter: ""
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


def parse(args: list[str]):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="source", required=True)
    for name in ("stdlib", "files"):
        s = sub.add_parser(name)
        s.add_argument("--out", required=True, help="folder to make, data/<name>")
        s.add_argument("--tokens", type=int, required=True, help="train tokens, exactly")
        s.add_argument("--val_tokens", type=int, required=True, help="held-out tokens, exactly")
        s.add_argument("--seed", type=int, default=0, help="order of the files")
        s.add_argument("--window", type=int, default=128, help="tokens a window in the check for windows of one token")
        s.add_argument("--suite", action="store_true", help="make the lm-eval tasks cloze and lastword from the val documents")
        if name == "files":
            s.add_argument("glob", nargs="+")
            s.add_argument("--tokenizer", default="byte", help="byte, gpt2 or bits")
        else:
            s.set_defaults(tokenizer="byte")
    a = p.parse_args(args)
    if min(a.tokens, a.val_tokens, a.window) < 2 or not 0 <= a.seed < 2**32:
        p.error("--tokens, --val_tokens and --window must be at least 2, --seed from 0 to 2^32 - 1")
    return a


if __name__ == "__main__":
    prepare(parse(sys.argv[1:]))
