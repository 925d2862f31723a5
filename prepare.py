"""Corpora -> uint16 token bins and a manifest: data/<name>/{train.bin,val.bin,documents.bin,manifest.json}.

    python prepare.py fineweb-edu --out=data/1b --tokens=3000000000 --val_tokens=20000000        # sample/10BT's parquet files, as gpt2 tokens
    python prepare.py dclm --out=data/dclm --tokens=3000000000 --val_tokens=20000000             # jsonl.zst files of dclm-baseline-1.0
    python prepare.py wikitext103 --out=data/bits --tokens=3000000000 --val_tokens=8000000 --tokenizer=bits
    python prepare.py files 'corpus/**/*.jsonl' --out=data/mine --tokens=12500000 --val_tokens=1000000 --tokenizer=gpt2
    python prepare.py stdlib --out=data/nano --tokens=32000 --val_tokens=150000 --suite          # the standard library's sources, as bytes
    python prepare.py verify data/1b                                                             # recompute it all, look at samples

A source is a list of files in an order drawn from the seed: .parquet and .jsonl (also .zst) hold many documents, under "text"; any other
file is one. --from=DIR reads a public source from a local copy of its files. Held-out first: documents of the first file whose hash,
salted with the seed, is below a threshold, until val has its tokens. Train is the rest in order, cut at exactly --tokens, without exact
duplicates (128 bits) and without what shares over half its shingles, or those of a val document, with val. --suite makes two lm-eval tasks
from val. A stopped run goes on with the same command; the bins do not depend on --workers or on interruptions. The folder appears when whole.
"""

import argparse
import collections
import concurrent.futures.process
import contextlib
import ctypes
import fnmatch
import functools
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sqlite3
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

import guard
from guard import Refusal

PUBLIC = {  # repository, files; --revision pins it, else the hub says at the start which commit main is, and that one is used throughout
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "dclm": ("mlfoundations/dclm-baseline-1.0", "*.jsonl.zst"),
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1/train-*.parquet"),
}
GPT2_FILES = {"vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"}  # names in tiktoken's cache
GPT2_URL = "https://openaipublic.blob.core.windows.net"  # whence tiktoken has them
STREAMS = (".parquet", ".jsonl", ".jsonl.zst")  # files of many documents
BLOCK = 1 << 20  # bytes of text that a worker gets at a time
CHUNK = 1 << 22  # tokens read at a time
COMMIT_SECONDS = 5  # of work lost at most when a run is stopped
FIRST_SHARE = 1 / 64  # of the first file's documents that are tried for val
ZLIB_SAMPLE = 1 << 22  # bytes of text packed for the zlib ratio: all of a smaller one, about these of a larger one, at least 1%
VAL_SHINGLES = 1 << 22  # of val, about; beyond, one in 2, 4, 8 ... is kept
COMMON = 64  # val documents that hold a shingle, beyond which it says nothing of which one
ENTRY = np.dtype([("digest", "V16"), ("tokens", "<u4")])  # a document of documents.bin: those of val, then those of train
SUITE_ITEMS = 500  # items of each task made from the held-out documents
TRIES = 10_000  # draws for one item before a text is called unfit
CONTEXT, CONTINUATION = 88, 32  # characters of a cloze item: with EOT they fit a window of 128 bytes


def no_answer(url: str, seconds: float = 3.0) -> str:
    """ "" or why a server does not answer, known within so many seconds: libraries offline retry for half a minute. eval.py and hf.py ask too."""
    problem = [f"no answer in {seconds:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            problem[0] = ""
        except urllib.error.HTTPError:
            problem[0] = ""  # it answers
        except OSError as e:
            problem[0] = str(getattr(e, "reason", e))

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up knows no timeout
    asking.start()
    asking.join(seconds)
    return problem[0]


def hub_down() -> str:
    """ "" or why nothing can be had from the hub."""
    return (
        "HF_HUB_OFFLINE is set"
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        else no_answer(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    )


# ---- sources ----------------------------------------------------------------------------------------------------------


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


def copied_files(name: str, folder: Path) -> tuple[list[Path], str]:
    """A public source's files in a local folder of the repository's layout."""
    repo, pattern = PUBLIC[name]
    files = sorted(p for p in folder.rglob("*") if p.is_file() and fnmatch.fnmatch(p.relative_to(folder).as_posix(), pattern))
    if not files:
        raise Refusal(f"{folder}: no file {pattern} in it, as {repo} has them; copy the repository's folders too")
    return files, f"{repo} from local files"


def hub_files(name: str, revision: str) -> dict:
    """The commit that a revision is now, and the source's files in it."""
    from huggingface_hub import HfApi

    repo, pattern = PUBLIC[name]
    try:
        if why := hub_down():
            raise ConnectionError(why)
        commit = HfApi().dataset_info(repo, revision=revision).sha
        files = HfApi().list_repo_files(repo, repo_type="dataset", revision=commit)
    except Exception as e:  # noqa: BLE001, whatever the hub's client raises
        why = (str(e).splitlines() or [type(e).__name__])[0]
        raise Refusal(
            f"{repo} at {revision}: the hub cannot be asked ({why}); check the network, the name, or give --from=DIR with its files {pattern}"
        ) from None
    files = sorted(f for f in files if fnmatch.fnmatch(f, pattern))
    if not files:
        raise Refusal(f"{repo} at {commit}: no file {pattern} in it; give another --revision")
    return {"source": repo, "revision": commit, "files": files}


def find_source(args, work: "Work") -> dict:
    """{"source", "revision", "files"}; a run that goes on takes the public commit it began with, and local files must be as they were."""
    if args.source in PUBLIC and not args.from_dir:
        work.at.setdefault("source", None)
        work.at["source"] = work.at["source"] or hub_files(args.source, args.revision)
        return work.at["source"]
    if args.source == "stdlib":
        files, name = stdlib_files()
    else:
        files, name = glob_files(args.glob) if args.source == "files" else copied_files(args.source, Path(args.from_dir))
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    work.check({"sha256 of the files' names, sizes and times": hashlib.sha256(json.dumps(stats).encode()).hexdigest()})
    return {"source": name, "revision": None, "files": [str(f.resolve()) for f in files]}


def fetch(source: dict, name: str) -> Path:
    """A file of the source on this disk; the hub's own client resumes and retries."""
    if not source["revision"]:
        return Path(name)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source["source"], name, repo_type="dataset", revision=source["revision"]))
    except Exception as e:  # noqa: BLE001, network, hub and disk raise what they like
        raise Stopped(f"{source['source']} {name}: download failed ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})") from None


def groups_of(source: dict, kind: str, seed: int) -> list[list[str]]:
    """The source as lists of files, each read as one: in an order drawn from the seed, files of one document each together, last."""
    if kind == "wikitext103":  # an article may begin in one file and end in the next
        return [source["files"]]
    files = [source["files"][i] for i in np.random.RandomState(seed).permutation(len(source["files"]))]
    loose = [f for f in files if not f.endswith(STREAMS)]
    return [[f] for f in files if f.endswith(STREAMS)] + ([loose] if loose else [])


# ---- blocks of documents ----------------------------------------------------------------------------------------------


def blocks_of(source: dict, group: list[str], kind: str) -> Iterator[tuple]:
    """A group as blocks of about BLOCK bytes of raw documents, for the workers: a function of the files alone. None stands before a download."""
    if not group[0].endswith(STREAMS):
        yield from ((paths, None, None) for paths in packed(group, lambda p: os.path.getsize(p)))
        return
    if kind == "wikitext103":
        rows = itertools.chain.from_iterable(parquet_rows(fetch(source, name)) for name in group)
        yield from ((None, "WikiText-103", block) for block in packed(((a, None) for a in articles(text for text, _ in rows)), lambda row: len(row[0])))
        return
    if source["revision"]:
        yield None
    path = fetch(source, group[0])
    if path.suffix == ".parquet":
        yield from ((None, path.name, block) for block in packed(parquet_rows(path), lambda row: len(row[0] or b"")))
    else:
        yield from ((str(path), line, data) for line, data in line_blocks(path))


def packed(items, size) -> Iterator[list]:
    """Items in lists of about BLOCK bytes."""
    block, total = [], 0
    for item in items:
        block.append(item)
        total += size(item)
        if total >= BLOCK:
            yield block
            block, total = [], 0
    if block:
        yield block


def parquet_rows(path: Path) -> Iterator[tuple[bytes | None, str | None]]:
    """(text, url) of each row; rows are read by a few, whatever the size of the file's row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as f:
            columns = [c for c in ("text", "url") if c in f.schema_arrow.names]
            if "text" not in columns:
                raise Refusal(f'{path}: no column "text", only {", ".join(f.schema_arrow.names)}')
            for batch in f.iter_batches(256, columns=columns):
                texts = batch["text"].cast(pa.large_binary()).to_pylist()  # not as str: pyarrow does not say where UTF-8 is broken
                yield from zip(texts, batch["url"].to_pylist() if "url" in columns else itertools.repeat(None))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise Refusal(f"{path}: not readable as parquet ({str(e).splitlines()[0]}); fetch the file again") from None


def articles(rows: Iterator[bytes | None]) -> Iterator[bytes]:
    """WikiText's rows are lines, blank ones empty; an article begins at " = Title = " after a blank one."""
    lines, blank = [], True
    for row in rows:
        if blank and re.match(rb" = [^=].* = \n?$", row or b"") and b"".join(lines).strip():
            yield b"".join(lines)
            lines = []
        blank = not (row or b"").strip()
        lines.append(b"\n" if blank else row)
    yield b"".join(lines)


def line_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) of a .jsonl, packed by zstd or not."""
    import pyarrow as pa

    number, rest = 1, []
    try:
        with pa.input_stream(str(path), compression="zstd" if path.suffix == ".zst" else None) as f:
            while data := f.read(BLOCK):
                head, newline, tail = data.rpartition(b"\n")
                if newline:
                    yield number, (whole := b"".join([*rest, head, newline]))
                    number, rest = number + whole.count(b"\n"), []
                rest.append(tail)
    except (pa.ArrowException, OSError) as e:
        raise Refusal(f"{path}: not readable ({str(e).splitlines()[0]}); fetch the file again") from None
    if any(rest):
        yield number, b"".join(rest)


def unpack(block: tuple) -> tuple[list[str], list[str]]:
    """A block's documents and the source of each: its url's domain, else its file, else its folder. Bytes that are no UTF-8 become U+FFFD."""
    first, second, third = block
    if first is None:  # rows
        texts, urls = zip(*third)
        return [(t or b"").decode(errors="replace") for t in texts], [domain(u, second) for u in urls]
    if second is not None:  # lines
        rows = [json_row(first, number, line) for number, line in enumerate(third.split(b"\n"), second) if line.strip()]
        return [text for text, _ in rows], [domain(url, Path(first).name) for _, url in rows]
    texts = []
    for path in first:
        try:
            texts.append(Path(path).read_bytes().decode(errors="replace"))
        except OSError as e:
            raise Refusal(f"{path}: cannot be read ({e.strerror})") from None
    return texts, [Path(p).parent.name for p in first]


def json_row(path: str, number: int, line: bytes) -> tuple[str, str | None]:
    try:
        row = json.loads(line.decode(errors="replace"))
        return row["text"].encode(errors="replace").decode(), row.get("url")  # a lone surrogate becomes "?"
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise Refusal(f'{path}:{number}: not a JSON object with a "text" ({type(e).__name__}: {e})') from None


def domain(url, otherwise: str) -> str:
    return url.split("/")[2].removeprefix("www.") if isinstance(url, str) and url.count("/") >= 2 else otherwise


# ---- tokenizers -------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """UTF-8 bytes are the tokens; EOT = 256."""

    name, vocab_size, eot = "byte", 257, 256
    byte_lengths = np.array([1] * 256 + [0])  # bytes of text that each id stands for
    shingle = 5  # log2 of the tokens in a shingle

    def array(self, text: str) -> np.ndarray:
        """The ids of a text, of any unsigned type."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        return self.array(text).tolist()

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        return ids[ids < 256].astype(np.uint8).tobytes()

    def decode(self, ids: list[int]) -> str:
        return self.decode_bytes(np.array(ids, dtype=np.int64)).decode(errors="replace")


class BitTokenizer(ByteTokenizer):
    """The bits of UTF-8 bytes, the most significant first; no EOT."""

    name, vocab_size, eot = "bits", 2, None
    byte_lengths = np.array([1 / 8, 1 / 8])

    def array(self, text: str) -> np.ndarray:
        return np.unpackbits(super().array(text))

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        return np.packbits(ids[: len(ids) // 8 * 8].astype(np.uint8)).tobytes()


def tiktoken_folder() -> str:
    """Where tiktoken keeps and looks for GPT-2's files."""
    return os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache"))


class GPT2Tokenizer:
    """tiktoken's gpt2; special text inside a document is text. EOT = 50256. bpe: a folder of GPT-2's vocab.bpe and encoder.json."""

    name, shingle = "gpt2", 3

    def __init__(self, bpe: str | None = None):
        import tiktoken

        folder = tiktoken_folder()
        try:
            if not bpe and not all(Path(folder, v).exists() for v in GPT2_FILES.values()) and (why := no_answer(GPT2_URL)):
                raise ConnectionError(why)
            self.bpe = gpt2_from(Path(bpe)) if bpe else tiktoken.get_encoding("gpt2")
        except Exception as e:  # noqa: BLE001, tiktoken lets through whatever requests or the file system raise
            why, names = (str(e).splitlines() or [type(e).__name__])[0], " and ".join(f"{k} as {folder}/{v}" for k, v in GPT2_FILES.items())
            raise Refusal(f"tiktoken cannot load gpt2 ({why}); offline put GPT-2's {names}, or give prepare.py --bpe=DIR with both") from None
        self.vocab_size, self.eot = self.bpe.n_vocab, self.bpe.eot_token

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(self.bpe.decode_single_token_bytes(i)) for i in range(self.eot)] + [0])

    def array(self, text: str) -> np.ndarray:
        return self.bpe.encode_to_numpy(text, disallowed_special=())  # encode_ordinary without its list of Python ints

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode_ordinary(text)

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        return self.bpe.decode_bytes(ids[ids < self.eot].tolist())

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode([i for i in ids if i < self.vocab_size])


def gpt2_from(folder: Path):
    """tiktoken's Encoding from local files."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    paths = [str(folder / name) for name in GPT2_FILES]
    try:
        with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # it would keep a copy by path, and take that one when the files change
            ranks = data_gym_to_mergeable_bpe_ranks(*paths)
    except Exception as e:  # noqa: BLE001, a broken file raises anything, an AssertionError first
        raise Refusal(f"{' and '.join(paths)}: not GPT-2's two files ({type(e).__name__}: {(str(e).splitlines() or ['they disagree'])[0]})") from None
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def get_tokenizer(name: str, bpe: str | None = None):
    """The tokenizer a manifest names; eval.py and prepare.py share it."""
    kinds = {"byte": ByteTokenizer, "gpt2": lambda: GPT2Tokenizer(bpe), "bits": BitTokenizer}
    if name not in kinds:
        raise Refusal(f'tokenizer "{name}" is unknown: one of {", ".join(kinds)}')
    tok = kinds[name]()
    if tok.vocab_size > 65_536:
        raise Refusal(f"tokenizer {name} has {tok.vocab_size:,} ids: a bin holds uint16, ids up to 65,535")
    if name == "gpt2" and tok.vocab_size != 50_257:
        raise Refusal(f"{bpe}: {tok.vocab_size:,} ids, GPT-2 has 50,257: not its files")
    return tok


def narrow(ids: np.ndarray) -> np.ndarray:
    """Ids as a bin holds them; Refusal on one that uint16 would turn into another."""
    if ids.dtype.itemsize > 2 and ids.size and (top := int(ids.max())) > 65_535:
        raise Refusal(f"token id {top:,}: a bin holds uint16, ids up to 65,535; use another tokenizer")
    return ids.astype("<u2")


# ---- near duplicates of val -------------------------------------------------------------------------------------------


def shingles(tok, ids: np.ndarray) -> np.ndarray:
    """Hashes (uint64) of every run of 2^tok.shingle tokens (of bytes, for bits), by doubling: h2n[i] = h_n[i] a + h_n[i + n]."""
    h = (np.packbits(ids.astype(np.uint8)) if tok.name == "bits" else ids).astype(np.uint64) + np.uint64(1)
    for n in (1 << i for i in range(tok.shingle)):
        h = h[: max(0, len(h) - n)] * np.uint64(0x9E3779B97F4A7C15 + 2 * n) + h[n:]
    return (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def distinct(hashes: np.ndarray) -> np.ndarray:
    """Sorted, each once; np.unique takes five times as long."""
    hashes = np.sort(hashes)
    return hashes[np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]]


def write_index(folder: Path, tok, docs: Iterator[np.ndarray], val_tokens: int) -> int:
    """Val's distinct shingles, sorted, with the document of each, and a table of their top bits; returns that one in n was kept."""
    every = 1 << max(0, (val_tokens // (8 if tok.name == "bits" else 1) - 1).bit_length() - (VAL_SHINGLES.bit_length() - 1))
    own = [distinct(h[h & np.uint64(every - 1) == 0]) for h in (shingles(tok, ids) for ids in docs)]
    sizes = np.array([len(h) for h in own])
    hashes, owners = np.concatenate(own), np.repeat(np.arange(len(own)), sizes)
    order = np.argsort(hashes, kind="stable")
    table = np.zeros(1 << min(25, max(16, len(hashes).bit_length() + 4)), dtype=bool)
    table[hashes >> top_bits(table)] = True
    for name, array in {"hashes": hashes[order], "owners": owners[order], "sizes": sizes, "table": table}.items():
        np.save(folder / f"{name}.npy", array)
    return every


def top_bits(table: np.ndarray) -> np.uint64:
    """The shift that makes a place in the table of a hash."""
    return np.uint64(64 - (len(table) - 1).bit_length())


@functools.lru_cache(maxsize=1)
def open_index(folder: Path) -> list[np.ndarray]:
    """What write_index wrote, mapped, so that all workers share it."""
    return [np.asarray(np.load(folder / f"{n}.npy", mmap_mode="r")) for n in ("hashes", "owners", "sizes", "table")]


def near_val(tok, tokens: np.ndarray, ends: np.ndarray, folder: Path, every: int) -> np.ndarray:
    """Which documents (tokens back to back, one's end the next one's start) are near duplicates of val."""
    table, flags = open_index(folder)[3], np.zeros(len(ends), dtype=bool)
    h, ends = shingles(tok, tokens), ends // (8 if tok.name == "bits" else 1)
    at = np.flatnonzero(h & np.uint64(every - 1) == 0)
    doc = np.searchsorted(ends, at, side="right")
    inside = at + (1 << tok.shingle) <= ends[doc]
    h, doc = h[at[inside]], doc[inside]
    starts, hit = np.searchsorted(doc, np.arange(len(ends) + 1)), table[h >> top_bits(table)]
    for d in np.flatnonzero(np.bincount(doc[hit], minlength=len(ends))):
        part = slice(starts[d], starts[d + 1])
        flags[d] = mostly_val(distinct(h[part]), distinct(h[part][hit[part]]), *open_index(folder)[:3])
    return flags


def mostly_val(own: np.ndarray, hits: np.ndarray, hashes: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> bool:
    """Is over half of a document's distinct shingles in val, or over half of those of one val document in it."""
    left, right = (np.searchsorted(hashes, hits, side) for side in ("left", "right"))
    if 2 * np.count_nonzero(right > left) > len(own):
        return True
    left, counts = (a[(right > left) & (right - left <= COMMON)] for a in (left, right - left))
    at = np.repeat(left - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())  # left[0], left[0] + 1 .. right[0] - 1, left[1], ...
    found, shared = np.unique(owners[at], return_counts=True)
    return bool(np.any(2 * shared > sizes[found]))


# ---- workers ----------------------------------------------------------------------------------------------------------

TOK, SALT = None, b""  # set in each worker


def start_worker(tok, salt: bytes, parent: int) -> None:
    global TOK, SALT
    TOK, SALT = tok, salt
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole terminal; the parent answers it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a worker dies with its parent, however that dies
    if os.getppid() != parent:
        os._exit(1)


def salt_of(seed: int) -> bytes:
    return seed.to_bytes(8, "little")


def digest_of(text: bytes, salt: bytes) -> bytes:
    """128 bits of a text, salted with the seed: its first 64 also draw val."""
    return hashlib.blake2b(text, digest_size=16, salt=salt).digest()


def tokenize(block: tuple, share: float, index: tuple | None) -> dict:
    """A block's documents as ids, EOT after each, with digests and what is near val; of those not empty, whose digest is below `share`."""
    texts, names = unpack(block)
    digests = [digest_of(t.encode(), SALT) for t in texts]
    places = [i for i, t in enumerate(texts) if t and int.from_bytes(digests[i][:8], "little") < share * 2**64]
    eot = [] if TOK.eot is None else [np.array([TOK.eot], dtype="<u2")]
    ids = [np.concatenate([narrow(TOK.array(texts[i])), *eot]) for i in places]
    tokens, ends = np.concatenate([*ids, np.zeros(0, dtype="<u2")]), np.cumsum([len(i) for i in ids], dtype=np.int64)
    near = near_val(TOK, tokens, ends, *index) if index and places else np.zeros(len(places), dtype=bool)
    got = {"read": len(texts), "empty": [i for i, t in enumerate(texts) if not t], "places": places, "tokens": tokens, "ends": ends, "near": near}
    return got | {"digests": [digests[i] for i in places], "names": [names[i] for i in places]}


def recheck(folder: Path, split: str, first: int, count: int, start: int, last: bool) -> int:
    """How many of some documents in a bin are not what documents.bin says: other text, or an EOT missing or inside."""
    docs = entries(folder, first, count)
    ids = np.fromfile(folder / f"{split}.bin", dtype="<u2", offset=2 * start, count=int(docs["tokens"].sum()))
    bad = 0
    for i, part in enumerate(np.split(ids, np.cumsum(docs["tokens"])[:-1])):
        ends = TOK.eot is None or (TOK.eot not in part[:-1] and (part[-1] == TOK.eot or (last and i == count - 1)))
        bad += not ends or digest_of(TOK.decode_bytes(part), SALT) != docs["digest"][i].tobytes()
    return bad


class Pool:
    """Worker processes that give results in the order of their jobs; none outlives this process, nor the `with`."""

    def __init__(self, tok, seed: int, workers: int):
        context = multiprocessing.get_context("fork")
        self.run = concurrent.futures.ProcessPoolExecutor(workers, context, start_worker, (tok, salt_of(seed), os.getpid()))
        self.ahead = 2 * workers + 2  # jobs given out at a time: enough to keep all busy, few enough for memory
        self.run.submit(os.getpid).result()  # forks them all now, before a downloader starts its threads

    def ordered(self, function, jobs: Iterator[tuple | None]) -> Iterator[tuple]:
        """(tag, function(*args)) of each (tag, *args); a None among the jobs waits until all before it are through."""
        waiting = collections.deque()
        for job in itertools.chain(jobs, [None]):
            while waiting and (job is None or len(waiting) >= self.ahead):
                tag, future = waiting.popleft()
                yield tag, future.result()
            if job:
                waiting.append((job[0], self.run.submit(function, *job[1:])))

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.run.shutdown(cancel_futures=True)  # waits for the jobs at hand: a worker killed while it writes leaves a reader that waits for ever


# ---- the half-made folder ---------------------------------------------------------------------------------------------


class Stopped(Refusal):
    """A stop that leaves the half-made folder: the same command goes on."""


class Work:
    """made/, whose bins grow, and state.sqlite: how far they count, every digest seen, tokens a source. On disk, so that memory stays flat."""

    def __init__(self, folder: Path, command: dict):
        self.folder, self.made, self.committed, self.keep = folder, folder / "made", time.monotonic(), False
        self.made.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(folder / "state.sqlite", isolation_level=None, timeout=0)
        try:
            for line in ("PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL", "BEGIN IMMEDIATE"):
                self.db.execute(line)
        except sqlite3.OperationalError as e:
            raise Stopped(f"{folder}: another prepare.py is at work there, or the disk is full ({e})") from None
        self.db.execute("CREATE TABLE IF NOT EXISTS docs (digest BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID")
        self.db.execute("CREATE TABLE IF NOT EXISTS sources (name TEXT PRIMARY KEY, documents INTEGER, tokens INTEGER) WITHOUT ROWID")
        self.db.execute("CREATE TABLE IF NOT EXISTS state (at TEXT)")
        saved = self.db.execute("SELECT at FROM state").fetchone()
        self.at = json.loads(saved[0]) if saved else {"command": command}
        self.check(command)
        self.files = {name: open(self.made / name, "ab") for name in ("val.bin", "train.bin", "documents.bin")}  # noqa: SIM115, closed by close
        if saved and all(f.seek(0, os.SEEK_END) >= size for f, size in self.sizes()):
            self.keep, self.safe = True, self.at["train"]["tokens"]
            self.rewind()
        else:
            self.restart()

    def check(self, command: dict) -> None:
        was = self.at["command"]
        if diffs := [f"{k} was {was[k]}, is {v}" for k, v in command.items() if was.setdefault(k, v) != v]:
            raise Stopped(f"{self.folder}: half made by another command ({'; '.join(diffs)}): give that one, another --out, or remove this folder")

    def restart(self) -> None:
        """From nothing; val is made in one go."""
        for table in ("docs", "sources"):
            self.db.execute(f"DELETE FROM {table}")
        none = {"documents": 0, "tokens": 0}
        self.at |= {"held_out": False, "val": none, "train": dict(none), "group": 0, "block": 0, "read": 0}
        self.at |= {"duplicates": 0, "near": 0, "empty": 0}
        self.rewind()

    def sizes(self) -> list[tuple]:
        """The files, with the bytes of each that count."""
        documents = self.at["val"]["documents"] + self.at["train"]["documents"]
        sizes = (2 * self.at["val"]["tokens"], 2 * self.at["train"]["tokens"], ENTRY.itemsize * documents)
        return list(zip(self.files.values(), sizes))

    def rewind(self) -> None:
        """Cut off what was written after the last commit."""
        for f, size in self.sizes():
            f.truncate(size)

    def flush(self) -> None:
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())

    def commit(self) -> None:
        """What is written so far counts from here on, whatever happens next."""
        self.flush()
        self.db.execute("DELETE FROM state")
        self.db.execute("INSERT INTO state VALUES (?)", (json.dumps(self.at),))
        self.db.execute("COMMIT")
        self.db.execute("BEGIN IMMEDIATE")
        self.committed, self.keep, self.safe = time.monotonic(), True, self.at["train"]["tokens"]

    def close(self) -> None:
        for close in (*(f.close for f in self.files.values()), self.db.close):
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk: what is lost was not committed
                close()

    def is_new(self, digest: bytes, place: int | None) -> bool:
        return self.db.execute("INSERT OR IGNORE INTO docs VALUES (?, ?)", (digest, place)).rowcount == 1

    def stands_in_val(self, digest: bytes, place: int) -> bool:
        return self.db.execute("SELECT place FROM docs WHERE digest = ?", (digest,)).fetchone()[0] == place

    def write(self, split: str, tok, ids: np.ndarray, digest: bytes, salt: bytes, want: int) -> int:
        """A document, cut where the split has its tokens; returns how many were written."""
        cut = ids[: want - self.at[split]["tokens"]]
        if len(cut) < len(ids):
            digest = digest_of(tok.decode_bytes(cut), salt)
        self.files[f"{split}.bin"].write(cut.tobytes())
        self.files["documents.bin"].write(struct.pack("<16sI", digest, len(cut)))
        self.at[split]["documents"] += 1
        self.at[split]["tokens"] += len(cut)
        return len(cut)

    def count(self, sources: dict[str, list[int]]) -> None:
        add = "ON CONFLICT (name) DO UPDATE SET documents = documents + excluded.documents, tokens = tokens + excluded.tokens"
        self.db.executemany(f"INSERT INTO sources VALUES (?, ?, ?) {add}", [(name, *n) for name, n in sources.items()])

    def top_sources(self) -> list[dict]:
        rows = self.db.execute("SELECT name, documents, tokens FROM sources ORDER BY tokens DESC, name LIMIT 20")
        return [{"source": name, "documents": documents, "tokens": tokens} for name, documents, tokens in rows]


# ---- val, then train --------------------------------------------------------------------------------------------------


def hold_out(work: Work, pool: Pool, args, tok, source: dict, groups: list[list[str]]) -> None:
    """val.bin and its index: a share of the first file's documents, larger until it suffices; where all of them do not, the source's first ones."""
    share, want = FIRST_SHARE if groups[0][0].endswith(STREAMS) else 1.0, args.val_tokens
    while not take_val(work, pool, args, tok, share, (b for g in groups[: None if share == 1 else 1] for b in blocks_of(source, g, args.source))):
        got = work.at["val"]["tokens"]
        if share == 1:
            raise Refusal(short(got, "val.bin", want))
        share = min(1.0, max(2 * share, 1.2 * share * want / max(1, got)))
        work.restart()
    work.flush()
    docs = stored(work.made, "val", 0, work.at["val"]["documents"])
    work.at |= {"held_out": True, "share": share, "every": write_index(work.folder, tok, docs, want)}
    work.commit()


def take_val(work: Work, pool: Pool, args, tok, share: float, blocks: Iterator) -> bool:
    """Write val's documents until it has its tokens; False when there are too few."""
    report, read = progress("val  "), 0
    for _, got in pool.ordered(tokenize, (b and (None, b, share, None) for b in blocks)):
        for place, digest, ids in zip(got["places"], got["digests"], np.split(got["tokens"], got["ends"][:-1])):
            if work.is_new(digest, read + place):
                work.write("val", tok, ids, digest, salt_of(args.seed), args.val_tokens)
            if work.at["val"]["tokens"] == args.val_tokens:
                break
        read += got["read"]
        report(work.at["val"]["tokens"], args.val_tokens)
        if work.at["val"]["tokens"] == args.val_tokens:
            return True
    return False


def fill(work: Work, pool: Pool, args, tok, source: dict, groups: list[list[str]]) -> None:
    """train.bin: all other documents in order, from wherever the work stands, until it has its tokens."""
    report, index = progress("train", work.at["train"]["tokens"]), (work.folder, work.at["every"])
    jobs = train_jobs(work, args, source, groups) if work.at["train"]["tokens"] < args.tokens else []
    for (group, block), got in pool.ordered(tokenize, (job and (*job, 1.0, index) for job in jobs)):
        take_train(work, tok, got, args)
        work.at |= {"group": group, "block": block + 1}
        report(work.at["train"]["tokens"], args.tokens)
        if work.at["train"]["tokens"] == args.tokens:
            break
        if time.monotonic() - work.committed > COMMIT_SECONDS:
            work.commit()
    work.commit()
    if work.at["train"]["tokens"] < args.tokens:
        work.keep = False
        raise Refusal(short(work.at["train"]["tokens"], "train.bin", args.tokens))


def train_jobs(work: Work, args, source: dict, groups: list[list[str]]) -> Iterator[tuple | None]:
    """((group, number), block) from where the work stood when this began."""
    first, done = work.at["group"], work.at["block"]
    for g in range(first, len(groups)):
        number = 0
        for block in blocks_of(source, groups[g], args.source):
            if block is None:
                yield None
                continue
            if g > first or number >= done:
                yield (g, number), block
            number += 1


def take_train(work: Work, tok, got: dict, args) -> None:
    """A block's documents into train.bin, but for val's own, duplicates and near duplicates of val's."""
    at, sources, end = work.at, {}, got["read"]
    for place, digest, name, near, ids in zip(got["places"], got["digests"], got["names"], got["near"], np.split(got["tokens"], got["ends"][:-1])):
        if at["train"]["tokens"] == args.tokens:
            end = place
            break
        if not work.is_new(digest, None):
            at["duplicates"] += not work.stands_in_val(digest, at["read"] + place)
        elif near:
            at["near"] += 1
        else:
            n = work.write("train", tok, ids, digest, salt_of(args.seed), args.tokens)
            counts = sources.setdefault(name, [0, 0])
            counts[0], counts[1] = counts[0] + 1, counts[1] + n
    at["read"] += got["read"]
    at["empty"] += sum(e < end for e in got["empty"])  # not those beyond the last document, which depend on BLOCK
    work.count(sources)


def short(tokens: int, name: str, want: int) -> str:
    return f"prepare.py: the source holds {tokens:,} tokens for {name}, {want:,} were asked for; ask for less or add files"


def progress(label: str, done_before: int = 0):
    """report(done, want) -> a line on stderr at most twice a second."""
    start = last = time.perf_counter()

    def report(done: int, want: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > 0.5 or done == want:
            last = now
            rate = (done - done_before) / (now - start) or 1
            print(
                f"\r{label}  {done / want:4.0%}  {done:,}/{want:,} tokens  {rate:,.0f} tok/s  ETA {(want - done) / rate:.0f}s ",
                end="\n" if done == want else "",
                file=sys.stderr,
            )

    return report


# ---- what is in the bins ----------------------------------------------------------------------------------------------


def entries(folder: Path, first: int, count: int) -> np.ndarray:
    return np.fromfile(folder / "documents.bin", dtype=ENTRY, offset=first * ENTRY.itemsize, count=count)


def spans(folder: Path, first: int, count: int, step: int = 1 << 11) -> Iterator[tuple[int, int, int]]:
    """(entry, how many, token in the bin) of a split's documents, `step` at a time."""
    start = 0
    for i in range(first, first + count, step):
        n = min(step, first + count - i)
        yield i, n, start
        start += int(entries(folder, i, n)["tokens"].sum())


def stored(folder: Path, split: str, first: int, count: int, every: int = 1) -> Iterator[np.ndarray]:
    """The ids of each document of a bin, or of one in `every`."""
    for i, n, start in spans(folder, first, count):
        sizes = entries(folder, i, n)["tokens"].astype(np.int64)
        for j in range(-i % every, n, every):
            yield np.fromfile(folder / f"{split}.bin", dtype="<u2", offset=2 * int(start + sizes[:j].sum()), count=int(sizes[j]))


def measure(folder: Path, split: str, first: int, count: int, tok) -> dict:
    """A split's entry of the manifest, from its files alone, read by chunks. Text bytes are those of the tokens."""
    path, ids, lengths, longest = folder / f"{split}.bin", np.zeros(65_536, dtype=np.int64), np.zeros(1 << 20, dtype=np.int64), 0
    tokens = path.stat().st_size // 2
    for i in range(0, tokens, CHUNK):
        ids += np.bincount(np.fromfile(path, dtype="<u2", offset=2 * i, count=CHUNK), minlength=65_536)
    for i, n, _ in spans(folder, first, count):
        sizes = entries(folder, i, n)["tokens"]
        longest = max(longest, int(sizes.max()))
        lengths += np.bincount(np.minimum(sizes, len(lengths) - 1), minlength=len(lengths))
    text_bytes = int(ids[: tok.vocab_size] @ tok.byte_lengths)
    every, packer, packed, raw = min(100, max(1, text_bytes // ZLIB_SAMPLE)), zlib.compressobj(), 0, 0
    for text in (tok.decode_bytes(d) for d in stored(folder, split, first, count, every)):  # one stream, so that documents alike pack away
        raw, packed = raw + len(text), packed + len(packer.compress(text))
    at = [int(np.searchsorted(np.cumsum(lengths), q * count)) for q in (0.01, 0.1, 0.5, 0.9, 0.99)]
    return {
        "documents": count, "tokens": tokens, "text_bytes": text_bytes, "sha256": guard.sha256_file(path),
        "zlib_ratio": (packed + len(packer.flush())) / max(1, raw), "zlib_sample": f"1 document in {every}", "bytes_per_token": text_bytes / tokens,
        "distinct_ids": int(np.count_nonzero(ids)), "commonest_id": int(ids.argmax()), "commonest_share": float(ids.max() / tokens),
        "document_tokens": dict(zip(("1%", "10%", "50%", "90%", "99%", "most"), [*at, longest])),
    }  # fmt: skip


def measured(folder: Path, val: int, train: int, tok) -> dict:
    """What a manifest says that the folder's files themselves can tell."""
    splits = {"train": measure(folder, "train", val, train, tok), "val": measure(folder, "val", 0, val, tok)}
    same = {k: splits["train"][k] for k in ("zlib_ratio", "commonest_share", "distinct_ids")}
    return splits | same | {"documents_sha256": guard.sha256_file(folder / "documents.bin")}


def print_table(manifest: dict) -> None:
    print(f"{'':18}{'train':>16}{'val':>16}")
    for key, form in (("documents", ",d"), ("tokens", ",d"), ("text_bytes", ",d"), ("bytes_per_token", ".3f"), ("distinct_ids", ",d"), ("commonest_share", ".4f"), ("zlib_ratio", ".4f")):  # fmt: skip
        print(f"{key:18}" + "".join(f"{format(manifest[s][key], form):>16}" for s in ("train", "val")))
    for q in manifest["train"]["document_tokens"]:
        print(f"{'tokens a doc, ' + q:18}" + "".join(f"{manifest[s]['document_tokens'][q]:>16,d}" for s in ("train", "val")))
    print(", ".join(f"{k} {manifest[k]:,}" for k in ("exact_duplicates_dropped", "near_duplicates_dropped", "empty_dropped")))
    total = manifest["train"]["tokens"]
    print("top sources: " + ", ".join(f"{row['source']} {row['tokens'] / total:.1%}" for row in manifest["top_sources"][:8]))


# ---- commands ---------------------------------------------------------------------------------------------------------


def prepare(args) -> None:
    """Make the whole folder beside its final place, check it, then move it there."""
    tok = get_tokenizer(args.tokenizer, args.bpe)
    out = Path(args.out).resolve()
    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    work, source = None, {"revision": None}
    try:
        work = Work(out.parent / f".{out.name}.part", {k: v for k, v in vars(args).items() if k not in ("out", "workers", "bpe")})
        source = find_source(args, work)
        check_out(out, [] if source["revision"] else source["files"])
        check_space(work, args)
        with Pool(tok, args.seed, args.workers) as pool:
            groups = groups_of(source, args.source, args.seed)
            if not work.at["held_out"]:
                hold_out(work, pool, args, tok, source, groups)
            fill(work, pool, args, tok, source, groups)
        work.keep = False
        manifest = finish(work, args, tok, source)
        replace_folder(work.made, out)
    except (OSError, sqlite3.Error, concurrent.futures.process.BrokenProcessPool) as e:
        raise Stopped(f"{out}: stopped ({type(e).__name__}: {e}); when that is mended, the same command goes on{standing(work)}") from None
    except Refusal as e:
        if work and not (work.keep and source["revision"]) and not isinstance(e, Stopped):  # a local file that is mended is another source
            shutil.rmtree(work.folder, ignore_errors=True)
        raise
    finally:
        if work:
            work.close()
        for s, handler in before.items():
            signal.signal(s, handler)
    shutil.rmtree(work.folder, ignore_errors=True)
    print_table(manifest)
    print(f"{args.out}: {args.tokens:,} train and {args.val_tokens:,} val tokens of {source['source']}")


def stop(number: int, frame) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Stopped(f"prepare.py: stopped by {signal.Signals(number).name}; the same command goes on")


def standing(work: Work | None) -> str:
    return f" from {work.safe:,} train tokens" if work and work.keep else ""


def check_out(out: Path, files: list[str]) -> None:
    """Only a folder that prepare.py made, or none, may be replaced, and never one that the documents come from."""
    known = {"train.bin", "val.bin", "documents.bin", "manifest.json", "tasks"}
    if out.exists() and not (out.is_dir() and {p.name for p in out.iterdir()} <= known):
        raise Refusal(f"{out}: exists and holds other things than prepare.py makes; give another --out")
    if inside := next((f for f in files if out in Path(f).parents), None):
        raise Refusal(f"{out}: the source file {inside} lies in it; give another --out")


def check_space(work: Work, args) -> None:
    """Room for the bins, 20% over for digests and list, and val's index; not for downloads, which go to the hub's cache."""
    left = args.tokens + args.val_tokens - work.at["train"]["tokens"] - work.at["val"]["tokens"]
    need = int(2.4 * left) + 48 * min(args.val_tokens, VAL_SHINGLES)
    if (free := shutil.disk_usage(work.folder).free) < need:
        raise Stopped(f"{work.folder}: {free / 1e9:.3f} GB free, {need / 1e9:.3f} GB needed for {left:,} tokens; make room, then the same command again")


def finish(work: Work, args, tok, source: dict) -> dict:
    """Manifest, checks and suite: all that is made once the bins are whole."""
    at = work.at
    manifest = {
        "source": source["source"], "revision": source["revision"], "seed": args.seed, "tokenizer": tok.name, "vocab_size": tok.vocab_size, "eot": tok.eot,
        **measured(work.made, at["val"]["documents"], at["train"]["documents"], tok), "exact_duplicates_dropped": at["duplicates"],
        "near_duplicates_dropped": at["near"], "empty_dropped": at["empty"], "val_share": at["share"],
        "shingles": {"tokens": 1 << tok.shingle, "kept": f"1 in {at['every']}"}, "top_sources": work.top_sources(), "command": at["command"],
        "date": time.strftime("%Y-%m-%d"), "versions": guard.versions(),
    }  # fmt: skip
    guard.write_json(work.made / "manifest.json", manifest)
    guard.check_data(work.made, *guard.open_data(work.made), vocab_size=tok.vocab_size, window=args.window)
    if args.suite:
        texts = [tok.decode_bytes(d).decode(errors="replace") for d in stored(work.made, "val", 0, at["val"]["documents"])]
        write_suite(work.made / "tasks", texts, args.seed)
    return manifest


def replace_folder(new: Path, old: Path) -> None:
    """Put a finished folder in the old one's place; the old one stands until the new is whole."""
    aside = old.with_name(f".{old.name}.old")
    if old.exists():
        shutil.rmtree(aside, ignore_errors=True)
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def verify(args) -> None:
    """Recompute a folder's manifest from its bins, each document's digest from its tokens, and, with --from, the bins from their source."""
    folder = Path(args.folder)
    manifest, _, _ = guard.open_data(folder)
    tok = get_tokenizer(manifest["tokenizer"], args.bpe)
    try:
        val, train, seed, command = manifest["val"]["documents"], manifest["train"]["documents"], manifest["seed"], manifest["command"]
        size = (folder / "documents.bin").stat().st_size
    except (KeyError, FileNotFoundError) as e:
        raise Refusal(f"{folder}: made by an earlier prepare.py, which left no list of documents ({e}); prepare it again") from None
    if size != ENTRY.itemsize * (val + train):
        raise Refusal(f"{folder}/documents.bin: {size:,} bytes are not the manifest's {val + train:,} documents; prepare it again")
    now = measured(folder, val, train, tok)
    wrong = [f"{k} is {now[k]}, the manifest says {manifest.get(k)}" for k in now if now[k] != manifest.get(k)]
    with Pool(tok, seed, args.workers) as pool:
        for split, first, count in (("val", 0, val), ("train", val, train)):
            jobs = ((None, folder, split, i, n, start, i + n == first + count) for i, n, start in spans(folder, first, count))
            if bad := sum(n for _, n in pool.ordered(recheck, jobs)):
                wrong.append(f"{split}.bin: {bad:,} documents are not those of documents.bin")
    if repeats := repeated(folder, val, train):
        wrong.append(f"{repeats:,} documents stand there more than once")
    if wrong:
        raise Refusal(f"{folder}: not as it was made: {'; '.join(wrong)}: prepare it again")
    guard.check_data(folder, *guard.open_data(folder), vocab_size=tok.vocab_size, window=command["window"])
    print_table(manifest)
    print_samples(folder, val, train, tok)
    if args.from_dir:
        rebuild(folder, manifest, args)
    print(f"{folder}: all as the manifest says" + (", and made anew from its source the same" if args.from_dir else ""))


def repeated(folder: Path, val: int, train: int) -> int:
    """How many documents of the list are there twice, each split's last one, which is cut, left out."""
    digests = np.fromfile(folder / "documents.bin", dtype=np.dtype([("a", "<u8"), ("b", "<u8"), ("tokens", "<u4")]))
    digests = np.delete(digests, [val - 1, val + train - 1])
    order = digests[np.lexsort((digests["a"], digests["b"]))]
    return int(np.count_nonzero((order["a"][1:] == order["a"][:-1]) & (order["b"][1:] == order["b"][:-1])))


def print_samples(folder: Path, val: int, train: int, tok) -> None:
    """The beginnings of three documents of each split."""
    for split, first, count in (("train", val, train), ("val", 0, val)):
        for i in sorted({0, count // 2, count - 1}):
            start = int(entries(folder, first, i)["tokens"].sum())
            ids = np.fromfile(folder / f"{split}.bin", dtype="<u2", offset=2 * start, count=min(1600, int(entries(folder, first + i, 1)["tokens"][0])))
            print(f"{split} document {i:,}: {tok.decode_bytes(ids).decode(errors='replace')[:200]!r}")


def rebuild(folder: Path, manifest: dict, args) -> None:
    """The same command once more, from the files in --from, into a folder beside: its bins must be the same."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.resolve().parent) as tmp:
        command = manifest["command"] | {"out": f"{tmp}/again", "bpe": args.bpe, "workers": args.workers}
        command |= {"from_dir": args.from_dir} | ({"glob": [os.path.join(args.from_dir, g) for g in command["glob"]]} if "glob" in command else {})
        prepare(argparse.Namespace(**command))
        again = guard.read_json(Path(tmp) / "again/manifest.json")
    keys = ("documents_sha256", "exact_duplicates_dropped", "near_duplicates_dropped", "empty_dropped", "train", "val")
    if wrong := [k for k in keys if again[k] != manifest[k]]:
        raise Refusal(f"{folder}: made anew from {args.from_dir}, it differs in {', '.join(wrong)}: other files, or another version of them")


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
    for name in (*PUBLIC, "files", "stdlib", "verify"):
        s = sub.add_parser(name)
        s.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that tokenize; the result does not depend on it")
        if name != "stdlib":
            s.add_argument("--bpe", help="folder of GPT-2's vocab.bpe and encoder.json, instead of tiktoken's cache")
        if name in (*PUBLIC, "verify"):
            s.add_argument("--from", dest="from_dir", help="folder of the source's files, instead of the network")
        if name == "verify":
            s.add_argument("folder", help="what an earlier run made")
            continue
        s.add_argument("--out", required=True, help="folder to make, data/<name>")
        s.add_argument("--tokens", type=int, required=True, help="train tokens, exactly")
        s.add_argument("--val_tokens", type=int, required=True, help="held-out tokens, exactly")
        s.add_argument("--seed", type=int, default=0, help="order of the files, and which documents are val")
        s.add_argument("--window", type=int, default=4096 if name in PUBLIC else 128, help="tokens a window in the check for windows of one token")
        s.add_argument("--suite", action="store_true", help="make the lm-eval tasks cloze and lastword from the val documents")
        if name == "files":
            s.add_argument("glob", nargs="+")
        if name in PUBLIC:
            s.add_argument("--revision", default="main", help="commit of the public repository")
        if name == "stdlib":
            s.set_defaults(tokenizer="byte", bpe=None)
        else:
            s.add_argument("--tokenizer", default="byte" if name == "files" else "gpt2", help="byte, gpt2 or bits")
    a = p.parse_args(args)
    if a.workers < 1:
        p.error("--workers must be at least 1")
    if a.source != "verify" and (min(a.tokens, a.val_tokens, a.window) < 2 or not 0 <= a.seed < 2**32):
        p.error("--tokens, --val_tokens and --window must be at least 2, --seed from 0 to 2^32 - 1")
    return a


def main(args: list[str]) -> None:
    a = parse(args)
    (verify if a.source == "verify" else prepare)(a)


if __name__ == "__main__":
    main(sys.argv[1:])
