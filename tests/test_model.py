"""The model against Hugging Face's Llama, torch's FLOP counter and closed formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train
from model import Transformer, check_shape, default_eps
from train import Config


def tiny(**changes) -> Config:
    return Config(**{"vocab_size": 101, "n_layer": 4, "n_embd": 48, "n_head": 4, "ffn_hidden": 80, "window": 24, "eps": 1.0} | changes)


def make(seed: int = 0, **changes) -> Transformer:
    model = Transformer(tiny(**changes))
    model.init_weights(seed)
    return model


def as_llama(model: Transformer):
    """The same function as a LlamaForCausalLM: blocks unrolled in the order they are applied, eps folded into o and down."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.c
    order = [i for i in range(c.n_layer) for _ in range(c.n_loop)] if c.loop_order == "layer" else list(range(c.n_layer)) * c.n_loop
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.ffn_hidden, num_hidden_layers=len(order), num_attention_heads=c.n_head,
        max_position_embeddings=c.window, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=c.tied, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    names = {"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj"}
    names |= {
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    own = model.state_dict()
    state = {"model.embed_tokens.weight": own["embed.weight"], "model.norm.weight": own["norm.weight"], "lm_head.weight": own["head.weight"]}
    for at, block in enumerate(order):
        for ours, theirs in names.items():
            scale = c.eps if ours in ("attn.o", "mlp.down") else 1.0
            state[f"model.layers.{at}.{theirs}.weight"] = own[f"blocks.{block}.{ours}.weight"] * scale
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(state)
    return llama.eval()


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"n_layer": 2, "n_loop": 2, "eps": default_eps(2, 2)}, {"n_layer": 2, "n_loop": 2, "eps": 0.5, "loop_order": "stack"}, {"n_layer": 2, "n_loop": 3, "eps": 0.3}],
    ids=["V", "tied", "L layer", "L stack", "L3"],
)  # fmt: skip
def test_logits_equal_llama(changes):
    model = make(**changes)
    with torch.no_grad():
        for p in model.parameters():  # away from the init, so that norms and every projection matter
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    tokens = torch.randint(101, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(tokens), as_llama(model)(tokens).logits
    assert ours.std() > 0.3
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("order", ["layer", "stack"])
def test_causal(order):
    model = make(n_loop=2, loop_order=order, eps=0.3)
    tokens = torch.randint(101, (1, 24))
    for t in (1, 11, 23):
        other = tokens.clone()
        other[0, t] = (other[0, t] + 1) % 101
        with torch.no_grad():
            a, b = model(tokens), model(other)
        assert torch.equal(a[:, :t], b[:, :t])
        assert not torch.equal(a[:, t:], b[:, t:])


def test_loop_orders_differ_and_agree_at_one_loop():
    tokens = torch.randint(101, (1, 24))
    with torch.no_grad():
        assert not torch.allclose(make(n_loop=2)(tokens), make(n_loop=2, loop_order="stack")(tokens))
        assert torch.equal(make(n_loop=1)(tokens), make(n_loop=1, loop_order="stack")(tokens))


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_loop": 2, "eps": 0.3}])
def test_overfits_one_batch(changes):
    model = make(**changes)
    data = torch.randint(101, (4, 25), generator=torch.Generator().manual_seed(2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert loss.item() < 0.05


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_loop": 2}, {"n_layer": 3, "n_loop": 3, "tied": True}])
def test_counts_and_flops(changes):
    model = make(**changes)
    c, n = model.c, model.counts()
    block = 4 * c.n_embd**2 + 3 * c.n_embd * c.ffn_hidden + 2 * c.n_embd
    tables = c.vocab_size * c.n_embd * (1 if c.tied else 2)
    assert n == {"stored": c.n_layer * block + tables + c.n_embd, "active": c.n_layer * c.n_loop * block + tables + c.n_embd, "embedding": tables}
    tokens = torch.randint(101, (2, 24))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the counter does not know the CPU's flash kernel
        model(tokens, tokens).backward()
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(model.flops_per_token(causal=False), rel=1e-9)
    assert model.flops_per_token() < model.flops_per_token(causal=False)


def test_both_arms_same_flops():
    assert make(n_layer=4).flops_per_token() == make(n_layer=2, n_loop=2).flops_per_token()


def test_published_sizes():
    """The 1b figures of the experiment, by the model's own count."""
    shape = {"vocab_size": 50304, "n_embd": 2048, "n_head": 16, "ffn_hidden": 5504, "window": 4096}
    sizes = {(24, 1): 1_420_396_544, (12, 2): 813_221_888, (8, 3): 610_830_336}
    for (n_layer, n_loop), stored in sizes.items():
        with torch.device("meta"):
            model = Transformer(tiny(n_layer=n_layer, n_loop=n_loop, **shape))
        assert model.counts()["stored"] == stored
        assert model.flops_per_token() == pytest.approx(9.11e9, rel=1e-3)
        assert model.flops_per_token(causal=False) == pytest.approx(10.32e9, rel=1e-3)


def test_init():
    model = make(seed=3, n_layer=8, n_embd=96, n_loop=2)
    own = model.state_dict()
    assert own["blocks.0.attn.q.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert own["blocks.0.attn.o.weight"].std().item() == pytest.approx(0.02 / math.sqrt(32), rel=0.03)
    assert own["blocks.7.mlp.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(32), rel=0.03)
    assert own["embed.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    again, other = make(seed=3, n_layer=8, n_embd=96, n_loop=2), make(seed=4, n_layer=8, n_embd=96, n_loop=2)
    assert all(torch.equal(a, b) for a, b in zip(own.values(), again.state_dict().values()))
    assert not torch.equal(own["embed.weight"], other.state_dict()["embed.weight"])


def test_stream_growth_at_init():
    """The rms that train.py records, d = 512, 24 applications, random tokens: V's stream grows about 6.9x, L's and VE's hardly.

    Not to the same: a block's consecutive outputs are nearly parallel, so that L adds twice VE's variance (1.40x against 1.20x).
    """
    growth, eps = {}, default_eps(12, 2)
    shape = {"n_embd": 512, "n_head": 8, "ffn_hidden": 1376, "micro_batch": 8, "batch": 8}
    data = np.random.RandomState(0).randint(101, size=400).astype("<u2")
    for arm, changes in {"V": {"n_layer": 24}, "VE": {"n_layer": 24, "eps": eps}, "L": {"n_layer": 12, "n_loop": 2, "eps": eps}}.items():
        model = make(**shape, **changes)
        rms = train.stream_rms(model, data, model.c, torch.device("cpu"), torch.float32)
        assert len(rms) == 1 + model.c.n_layer
        assert rms[0] == pytest.approx(0.02, rel=0.05)
        growth[arm] = rms[-1] / rms[0]
    assert growth["V"] == pytest.approx(6.9, rel=0.1)
    assert growth["L"] == pytest.approx(growth["VE"], rel=0.2)
    assert (growth["L"] ** 2 - 1) / (growth["VE"] ** 2 - 1) == pytest.approx(2, rel=0.2)


def test_loss_is_fp32_under_bf16():
    model = make(n_loop=2, eps=0.3)
    tokens = torch.randint(101, (4, 24))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens, "none")
    assert loss.dtype is torch.float32
    assert loss.unique().numel() > 0.9 * loss.bfloat16().unique().numel()
    assert not torch.equal(loss, loss.bfloat16().float())


def test_default_eps():
    assert default_eps(24, 1) == 1
    assert default_eps(12, 2) == pytest.approx(0.1443, abs=1e-4)
    assert default_eps(8, 3) == pytest.approx(1 / (3 * math.sqrt(8)))


@pytest.mark.parametrize("changes, word", [({"n_head": 5}, "divisible"), ({"n_embd": 12, "n_head": 4}, "odd"), ({"loop_order": "up"}, "loop_order"), ({"eps": -1.0}, "eps"), ({"n_layer": 0}, "at least 1")])  # fmt: skip
def test_bad_shapes(changes, word):
    with pytest.raises(ValueError, match=word):
        check_shape(SimpleNamespace(**{**vars(tiny()), **changes}))
