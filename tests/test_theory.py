"""Theory of the recipe on the CPU, by the model itself: how branch sums and streams grow at initialisation, and what a constant eps is the same as."""

import itertools
import math

import numpy as np
import pytest
import torch

from model import Transformer, default_eps
from train import Config, build_optimizer

TOKENS = torch.randint(101, (8, 24), generator=torch.Generator().manual_seed(1))


def make(dtype=torch.float32, **changes) -> Transformer:
    shape = {"vocab_size": 101, "n_embd": 512, "n_head": 8, "ffn_hidden": 1376, "window": 24, "eps": 1.0}
    model = Transformer(Config(**shape | changes))
    model.init_weights(0)
    return model.to(dtype)


@pytest.fixture(scope="module")
def vanilla() -> Transformer:
    """24 independent blocks."""
    return make(n_layer=24)


@torch.no_grad()
def outputs(model: Transformer, blocks: list[int], eps: float) -> list[torch.Tensor]:
    """(x_after - x_before) / eps of these blocks, one application each, in a row from the embedding on."""
    x, outs = model.embed(TOKENS), []
    for i in blocks:
        model.blocks[i].eps = eps
        after = model.blocks[i](x, model.cos, model.sin)
        outs.append((after - x) / eps)
        x = after
    return outs


def stream_growth(model: Transformer, eps: float, tokens: torch.Tensor = TOKENS) -> float:
    """rms of the residual stream after the last block over that of the embedding."""
    seen = []
    for block in model.blocks:
        block.eps = eps
    hooks = [m.register_forward_hook(lambda module, args, out: seen.append(out.square().mean().sqrt().item())) for m in (model.embed, *model.blocks)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen[-1] / seen[0]


def test_shared_outputs_add_up_like_n_and_independent_ones_like_its_root(vanilla):
    """The norm of the sum of N branch outputs under the recipe's eps = 1/(N sqrt 12): its log-log slope in N."""
    counts = [1, 2, 4, 8, 16]
    slopes = {}
    for kind in ("shared", "independent"):
        sums = [sum(outputs(vanilla, [0] * n if kind == "shared" else list(range(n)), 1 / (n * math.sqrt(12)))).norm().item() for n in counts]
        slopes[kind] = np.polyfit(np.log(counts), np.log(sums), 1)[0]
    assert slopes["shared"] == pytest.approx(1.0, abs=0.05)
    assert slopes["independent"] == pytest.approx(0.5, abs=0.1)


def test_stream_growth_at_init(vanilla):
    """24 applications, d = 512. V's stream grows 6.9 times. L's grows 1.40 to 1.41 times for N = 2, 3 and 4: eps = 1/(N sqrt L) keeps it whatever N.

    VE's with the same eps grows less: 1.20, 1.13, 1.10. A block's consecutive outputs are nearly parallel and add up like N, independent ones like
    sqrt N, so L adds about N times the variance that VE adds (measured 2.2, 3.5, 4.8). "L within 10% of VE" would be false: they are 17, 24 and 28% apart.
    """
    grown, added = {}, {}
    for n in (2, 3, 4):
        eps = default_eps(24 // n, n)
        looped, unlooped = stream_growth(make(n_layer=24 // n, n_loop=n, eps=eps), eps), stream_growth(vanilla, eps)
        grown[n], added[n] = looped, (looped**2 - 1) / (unlooped**2 - 1)
        assert unlooped < looped
    v = stream_growth(vanilla, 1.0)
    assert v == pytest.approx(6.9, rel=0.05)
    assert v > 4 * max(grown.values())
    assert grown == {n: pytest.approx(1.405, rel=0.02) for n in (2, 3, 4)}
    assert added == {n: pytest.approx(1.15 * n, rel=0.1) for n in (2, 3, 4)}


def test_the_distance_of_l_and_ve_shrinks_with_the_context():
    """At 24 tokens 17% apart for N = 2; at 256 tokens 12 to 13%: attention averages over more, and its share of the outputs fades in both."""
    eps, tokens = default_eps(12, 2), torch.randint(101, (2, 256), generator=torch.Generator().manual_seed(1))
    apart = {}
    for window, seen in ((24, TOKENS), (256, tokens)):
        looped, unlooped = (stream_growth(make(window=window, **shape), eps, seen) for shape in ({"n_layer": 12, "n_loop": 2, "eps": eps}, {"n_layer": 24}))
        apart[window] = looped / unlooped - 1
    assert apart == {24: pytest.approx(0.175, abs=0.01), 256: pytest.approx(0.126, abs=0.01)}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_consecutive_outputs_of_a_looped_block_are_parallel(vanilla, n):
    """Mean cosine over tokens, every block, under L's eps; with eps 1 they turn away, and independent blocks' are at right angles."""

    def cosines(blocks, eps):
        outs = outputs(vanilla, blocks, eps)
        pairs = [(a, b) for k, (a, b) in enumerate(itertools.pairwise(outs)) if (k + 1) % n]  # within one block's loop
        return [torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairs]

    looped = [i for i in range(24 // n) for _ in range(n)]
    assert min(cosines(looped, default_eps(24 // n, n))) > 0.9
    assert min(cosines(looped, 1.0)) < 0.7
    assert max(map(abs, cosines(list(range(24)), default_eps(24 // n, n)))) < 0.1


def pair(tied: bool, scale: str) -> tuple[Transformer, Transformer]:
    """(looped with eps, the same weights with eps 1 and norm_eps / eps^2 and the embedding scaled by 1/eps: its "output", or its "weights"), fp64."""
    eps, shape = default_eps(3, 2), {"n_layer": 3, "n_loop": 2, "n_embd": 48, "n_head": 4, "ffn_hidden": 80, "tied": tied}
    ours = make(torch.float64, eps=eps, norm_eps=1e-6, **shape)
    theirs = make(torch.float64, eps=1.0, norm_eps=1e-6 / eps**2, **shape)
    with torch.no_grad():  # away from the init, so that every norm and projection matters
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
            q.copy_(p)
        if scale == "weights":
            theirs.embed.weight.div_(eps)
    if scale == "output":
        theirs.embed.register_forward_hook(lambda module, args, out: out / eps)
    return ours, theirs


def train_both(ours: Transformer, theirs: Transformer, steps: int = 25) -> float:
    """Largest relative difference of the losses over some steps of the project's AdamW, clipped like its own, at a rate that moves the loss."""
    cfg = Config(lr=3e-3)
    opts, worst, first = [build_optimizer(cfg, m) for m in (ours, theirs)], 0.0, None
    for step in range(steps):
        tokens = torch.randint(101, (4, 25), generator=torch.Generator().manual_seed(step % 3))
        losses = [m(tokens[:, :-1], tokens[:, 1:]) for m in (ours, theirs)]
        first = first or losses[0].item()
        worst = max(worst, abs(losses[0].item() / losses[1].item() - 1))
        for loss, opt, m in zip(losses, opts, (ours, theirs)):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), cfg.grad_clip)
            opt.step()
            opt.zero_grad()
    assert losses[0].item() < first - 1  # it did train
    return worst


@pytest.fixture
def fp64_loss(monkeypatch):
    """The model's head computes its logits and loss in fp32 on purpose, which would hide an equality of 1e-12: keep this test in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)


@pytest.mark.parametrize("tied", [False, True])
def test_a_constant_eps_is_a_scale_of_the_embeddings_output(tied, fp64_loss):
    """x/eps runs through the same blocks with eps = 1: RMSNorm gives the same for x/eps once its norm_eps is divided by eps^2.

    The loss is the same function of the same parameters, so gradients, clipping, AdamW and its decay agree as well, for 25 steps and for any number.
    """
    ours, theirs = pair(tied, "output")
    assert (ours(TOKENS) - theirs(TOKENS)).abs().max() < 1e-9
    assert train_both(ours, theirs) < 1e-6
    assert all(torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in zip(ours.parameters(), theirs.parameters()))


def test_a_scale_of_the_embeddings_weights_trains_differently(fp64_loss):
    """The same function at the start, and not the same training: AdamW's step does not grow with a weight, so scaled weights move eps times as far."""
    ours, theirs = pair(False, "weights")
    assert (ours(TOKENS) - theirs(TOKENS)).abs().max() < 1e-9
    assert train_both(ours, theirs) > 1e-3


def test_without_its_norm_eps_the_equivalence_is_only_near(fp64_loss):
    ours, theirs = pair(False, "output")
    for module in theirs.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 1e-6
    assert (ours(TOKENS) - theirs(TOKENS)).abs().max() > 1e-7
