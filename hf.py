"""Hugging Face folders, both ways.

    python hf.py export out/nano/L_s0/best.pt exported/L_s0        # a folder that AutoModelForCausalLM, and any Llama runtime, loads
    python eval.py --from_hf HuggingFaceTB/SmolLM2-135M --suite=1b # a Llama-family folder or hub name scored through our model

A looped model is exported unrolled: each application of a block becomes a layer of its own and eps is folded into the two projections
that write to the stream, so the folder stores as many layers as there are applications. Weights are fp32, as trained.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import guard
from guard import Refusal
from model import check_shape
from prepare import get_tokenizer, hub_down
from train import Config

NAMES = {  # ours -> theirs, within a block
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
}  # fmt: skip
TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
PLAIN = {  # what our model is, where a config says anything of it; any other value is refused by name
    "model_type": ("llama",), "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "rope_scaling": (None,), "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,), "attention_dropout": (0.0, 0), "quantization_config": (None,), "sliding_window": (None,),
}  # fmt: skip


def first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


# ---- out --------------------------------------------------------------------------------------------------------------


def unrolled(weights: dict[str, torch.Tensor], c: Config) -> dict[str, torch.Tensor]:
    """A checkpoint's weights as a Llama's: blocks in the order they are applied, eps folded into o and down."""
    order = [i for i in range(c.n_layer) for _ in range(c.n_loop)] if c.loop_order == "layer" else list(range(c.n_layer)) * c.n_loop
    state = {theirs: weights[ours].clone() for ours, theirs in TOP.items() if not (c.tied and ours == "head.weight")}
    for at, block in enumerate(order):
        for ours, theirs in NAMES.items():
            scale = c.eps if ours in ("attn.o", "mlp.down") else 1.0
            state[f"model.layers.{at}.{theirs}.weight"] = weights[f"blocks.{block}.{ours}.weight"] * scale
    return state


def llama_config(c: Config, eot: int | None) -> dict:
    """config.json of the exported folder. RoPE's base is given in both the old and the new place."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.n_embd, "intermediate_size": c.ffn_hidden,
        "num_hidden_layers": c.n_layer * c.n_loop, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv_head or c.n_head,
        "max_position_embeddings": c.window, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": c.tied, "bos_token_id": eot, "eos_token_id": eot,
        "torch_dtype": "float32", "initializer_range": 0.02, "use_cache": True,
    }  # fmt: skip


def byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's table): itself where it can be printed."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(others)) for b in range(256)]


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding joins last to make a token: the merges below its own rank, lowest first."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def tokenizer_files(tok) -> dict[str, dict]:
    """tokenizer.json and tokenizer_config.json that encode as `tok` does; a byte tokenizer is byte-level BPE without merges."""
    letters = byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)
    ranks = tok.bpe._mergeable_ranks if tok.name == "gpt2" else {bytes([b]): b for b in range(256)}
    merges = [list(map(spell, merge_of(t, ranks))) for t in sorted(ranks, key=ranks.get) if len(t) > 1]
    end = {"id": tok.eot, "content": "<|endoftext|>", "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": tok.name == "gpt2"}
    model = {"type": "BPE", "vocab": {spell(t): i for t, i in ranks.items()} | {end["content"]: tok.eot}, "merges": merges, "unk_token": None}
    model |= {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None, "post_processor": None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end["content"],
        "eos_token": end["content"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    return {"tokenizer.json": whole | {"pre_tokenizer": level, "decoder": level, "model": model}, "tokenizer_config.json": config}


def export(path: str, out: str) -> None:
    """Write the folder whole or not at all."""
    ckpt, folder = guard.load_checkpoint(path), Path(out).resolve()
    try:
        c, weights = Config(**ckpt["config"]), ckpt["model"]
    except (KeyError, TypeError) as e:
        raise Refusal(f"{path}: not a checkpoint of this project ({e})") from None
    if folder.exists():
        raise Refusal(f"{out}: exists already; give another folder, or delete it")
    tok = get_tokenizer(guard.read_json(guard.HERE / c.data / "manifest.json")["tokenizer"])
    files = {"config.json": llama_config(c, tok.eot), "generation_config.json": {"bos_token_id": tok.eot, "eos_token_id": tok.eot}}
    if tok.name == "bits":
        print("bits have no tokenizer in that format: the folder holds the model alone")
    else:
        files |= tokenizer_files(tok)
        files["tokenizer_config.json"]["model_max_length"] = c.window
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        state = unrolled(weights, c)
        save_file(state, tmp / "model.safetensors", metadata={"format": "pt"})
        for name, content in files.items():
            (tmp / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        tmp.chmod(0o755)
        os.rename(tmp, folder)
    except KeyError as e:
        raise Refusal(f"{path}: not a whole checkpoint of this project (no {e} in it)") from None
    except (OSError, RuntimeError, SafetensorError) as e:  # a full disk is any of them
        raise Refusal(f"{out}: cannot be written ({first_line(e)}); make room and try again") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    n = c.n_layer * c.n_loop
    print(f"{out}: {n} layers of {c.n_layer} stored blocks, {sum(w.numel() for w in state.values()):,} parameters, tokenizer {tok.name}")


# ---- in ---------------------------------------------------------------------------------------------------------------


class HFTokenizer:
    """tokenizer.json of a folder, as eval.py calls a tokenizer. encode adds what the folder's template adds (a BOS); encode_plain does not."""

    def __init__(self, folder: Path, config: dict):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Refusal("--from_hf reads tokenizer.json with the package tokenizers: pip install -r requirements.txt") from None
        self.name, self.inner = "hf", Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.inner.no_truncation()  # whatever the file says: Hugging Face's own does not obey it either
        self.inner.no_padding()
        said = guard.read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        self.vocab_size, self.eot = config["vocab_size"], self.special(said.get("eos_token"), config.get("eos_token_id"))
        self.bos = self.special(said.get("bos_token"), None)
        self.bos = self.eot if self.bos is None else self.bos
        if self.eot is None:
            raise Refusal(f"{folder}: neither tokenizer_config.json nor config.json names an end-of-text token")

    def special(self, token: str | dict | None, default: int | list | None) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self.inner.token_to_id(text) if text else default[0] if isinstance(default, list) else default

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)


def fetch_folder(name: str) -> Path:
    """A local folder, or the hub's repository of that name downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    why = hub_down()  # then only what is cached
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], local_files_only=bool(why)))
    except Exception as e:  # noqa: BLE001, whatever the hub raises
        raise Refusal(f"--from_hf={name}: no such folder here, and the hub did not give it ({why or first_line(e)})") from None


def read_config(folder: Path) -> tuple[Config, dict]:
    """config.json of a Llama-family folder as our Config. Refusal names the first thing our model is not."""
    theirs = guard.read_json(folder / "config.json")
    rope = theirs.get("rope_parameters") or {}
    theirs = {"rope_theta": rope.get("rope_theta", 10_000.0)} | theirs
    for key, known in PLAIN.items():
        if theirs.get(key, known[0]) not in known:
            raise Refusal(f"{folder}: {key} = {theirs[key]!r}; our model has only {' or '.join(map(repr, known))}: a Llama-family model without extras")
    if rope.get("rope_type", "default") != "default":
        raise Refusal(f"{folder}: rope_type = {rope['rope_type']!r}; our model has only 'default': no scaling")
    try:
        c = Config(
            arm="HF", rung="hf", vocab_size=theirs["vocab_size"], n_layer=theirs["num_hidden_layers"], n_embd=theirs["hidden_size"], n_head=theirs["num_attention_heads"],
            n_kv_head=theirs.get("num_key_value_heads") or 0, ffn_hidden=theirs["intermediate_size"], window=theirs["max_position_embeddings"],
            tied=theirs.get("tie_word_embeddings", False), norm_eps=theirs["rms_norm_eps"], rope_theta=float(theirs["rope_theta"]), eps=1.0,
        )  # fmt: skip
        check_shape(c)
    except (KeyError, TypeError, ValueError) as e:
        raise Refusal(f"{folder}/config.json: not a Llama's ({type(e).__name__}: {e})") from None
    if theirs.get("head_dim") not in (None, c.n_embd // c.n_head):
        raise Refusal(f"{folder}: head_dim = {theirs['head_dim']}; our heads are hidden_size / num_attention_heads = {c.n_embd // c.n_head} wide")
    return c, theirs


def load(name: str) -> tuple[Config, dict[str, torch.Tensor], HFTokenizer]:
    """(Config, weights in fp32 by our names, tokenizer) of a Llama-family folder or hub name; anything that our model is not is refused by name."""
    folder = fetch_folder(name)
    c, theirs = read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "tokenizer.json").exists():
        raise Refusal(f"{folder}: no {'tokenizer.json' if files else '.safetensors file'} in it (of other formats nothing is read)")
    try:
        state = {k: v.float() for f in files for k, v in load_file(f).items() if not k.endswith("rotary_emb.inv_freq")}
    except (SafetensorError, OSError) as e:
        raise Refusal(f"{folder}: damaged weights ({first_line(e)}); fetch them again") from None
    names = {theirs: ours for ours, theirs in TOP.items()}
    names |= {f"model.layers.{i}.{b}.weight": f"blocks.{i}.{a}.weight" for i in range(c.n_layer) for a, b in NAMES.items()}
    if c.tied:
        state["lm_head.weight"] = state.get("model.embed_tokens.weight", state.get("lm_head.weight"))
    if state.keys() != names.keys():
        odd = sorted(state.keys() ^ names.keys())
        raise Refusal(f"{folder}: {len(odd)} tensors are missing or not of a plain Llama, the first {odd[0]}")
    return c, {names[k]: v for k, v in state.items()}, HFTokenizer(folder, theirs)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        raise SystemExit(__doc__)
    export(*sys.argv[2:])
