"""The model: both arms of the experiment in one class.

A pre-norm decoder-only transformer in the Llama style (RMSNorm, rotate-half RoPE, SwiGLU, no biases, no dropout) with
`n_layer` stored blocks, each applied `n_loop` times, every residual branch scaled by a constant `eps`:

    x = x + eps * attn(norm1(x));   x = x + eps * mlp(norm2(x))

V (vanilla) is n_loop = 1, eps = 1. L (looped) is half the blocks, n_loop = 2, eps = 1/(n_loop sqrt n_layer). Both run the
same number of block applications a token, so the same FLOPs. Nothing else differs between the arms.

    python model.py config/V_nano.py config/L_nano.py      # counts and FLOPs of some configs
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def default_eps(n_layer: int, n_loop: int) -> float:
    """Residual scale of an arm that names none: 1/(N sqrt L) for L unique blocks applied N times, 1 when N = 1."""
    return 1 / (n_loop * math.sqrt(n_layer)) if n_loop > 1 else 1.0


def rope_table(window: int, head_dim: int, theta: float, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, each (window, head_dim) fp32, halves repeated: the rotate-half convention of Llama."""
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(window, device=device, dtype=torch.float32), inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x (batch, heads, T, head_dim) in fp32, returned in x's dtype (RoFormer, arXiv 2104.09864)."""
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)


class Cache:
    """Keys and values of the tokens that some rows have read, so that what follows is read alone. Evaluation only.

    Kept by (block, loop): the applications of a looped block see different activations, so each has its own. lengths (B,) int64: how
    many tokens of each row count; what stands beyond them is padding.
    """

    def __init__(self, lengths: torch.Tensor):
        self.lengths, self.kv, self.rows, self.mask = lengths, {}, None, None

    def fork(self, rows: torch.Tensor) -> "Cache":
        """The cache that continuations of these rows (B',) read, any row any number of times. It takes up nothing new itself."""
        other = Cache(self.lengths[rows])
        other.kv, other.rows = self.kv, rows
        return other

    def positions(self, T: int) -> torch.Tensor:
        """Positions (B, T) of T new tokens a row; sets the mask (B, 1, T, old + T) of what they see: their row's old tokens, themselves, those before."""
        new, device = torch.arange(T, device=self.lengths.device), self.lengths.device
        if self.kv:
            old = next(iter(self.kv.values()))[0].shape[2]
            past = (torch.arange(old, device=device) < self.lengths[:, None])[:, None, None].expand(-1, 1, T, -1)
            self.mask = torch.cat((past, (new <= new[:, None]).expand(len(past), 1, T, T)), dim=3)
            return self.lengths[:, None] + new
        return new.expand(len(self.lengths), T)

    def join(self, key: tuple, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v (B, heads, T, head_dim) of the new tokens behind the old ones of their rows."""
        if key in self.kv:
            k, v = (torch.cat((old if self.rows is None else old[self.rows], new), dim=2) for old, new in zip(self.kv[key], (k, v)))
        if self.rows is None:
            self.kv[key] = k, v
        return k, v


class Attention(nn.Module):
    """Causal self-attention, n_head heads of n_embd / n_head; each n_head / n_kv_head of them share keys and values (arXiv 2305.13245)."""

    def __init__(self, n_embd: int, n_head: int, n_kv_head: int):
        super().__init__()
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.q = nn.Linear(n_embd, n_embd, bias=False)
        self.k = nn.Linear(n_embd, n_embd // n_head * n_kv_head, bias=False)
        self.v = nn.Linear(n_embd, n_embd // n_head * n_kv_head, bias=False)
        self.o = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache | None = None, key: tuple = ()) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, -1, D // self.n_head).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, mask = rotate(q, cos, sin), rotate(k, cos, sin), None
        if cache is not None:
            (k, v), mask = cache.join(key, k, v), cache.mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.n_kv_head < self.n_head)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, n_embd: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(n_embd, hidden, bias=False)
        self.up = nn.Linear(n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One stored block, the unit that is compiled and sharded: in layer order forward applies it n_loop times in a row."""

    def __init__(self, c):
        super().__init__()
        self.eps = float(c.eps)
        self.n_loop = c.n_loop if c.loop_order == "layer" else 1
        self.ckpt = c.ckpt
        self.norm1 = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.attn = Attention(c.n_embd, c.n_head, c.n_kv_head or c.n_head)
        self.norm2 = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.mlp = SwiGLU(c.n_embd, c.ffn_hidden)

    def apply_once(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache | None = None, key: tuple = ()) -> torch.Tensor:
        x = torch.add(x, self.attn(self.norm1(x), cos, sin, cache, key), alpha=self.eps)
        return torch.add(x, self.mlp(self.norm2(x)), alpha=self.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache | None = None, turn: int = 0) -> torch.Tensor:
        for i in range(self.n_loop):
            if cache is not None:
                x = self.apply_once(x, cos, sin, cache, (id(self), turn + i))
            elif torch.is_grad_enabled() and (self.ckpt == "all" or (self.ckpt == "loop" and i > 0)):  # recomputed in backward
                x = checkpoint(self.apply_once, x, cos, sin, use_reentrant=False)
            else:
                x = self.apply_once(x, cos, sin)
        return x


class Transformer(nn.Module):
    """Either arm, built from a train.Config or anything with its model fields. Weights are undefined until init_weights or load_state_dict.

    Raises ValueError on a shape that cannot be (n_embd not divisible by n_head, odd head size, unknown loop_order).
    """

    def __init__(self, c):
        super().__init__()
        check_shape(c)
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight
        self.make_rope(None)

    def make_rope(self, device: torch.device | None) -> None:
        """The rotary tables on a device; no part of a checkpoint, so made again after to_empty."""
        cos, sin = rope_table(self.c.window, self.c.n_embd // self.c.n_head, self.c.rope_theta, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Final-norm activations (B, T, n_embd) of tokens (B, T) int64, which follow what a cache holds; at most `window` tokens in all."""
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        if cache is not None:
            at = cache.positions(T).clamp(max=self.c.window - 1)  # padding may stand beyond the window
            cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.embed(tokens)
        for turn in range(1 if self.c.loop_order == "layer" else self.c.n_loop):
            for block in self.blocks:
                x = block(x, cos, sin, cache, turn)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None, reduction: str = "mean") -> torch.Tensor:
        """Logits (B, T, vocab) fp32 of tokens (B, T) int64; with targets (B, T), the cross entropy in nats instead.

        reduction "mean" gives a scalar, "none" one loss a token (B, T). The head and the loss run over loss_chunks chunks of the
        tokens, recomputed in backward, so that the logits of only one chunk exist at a time.
        """
        h = self.hidden(tokens)
        if targets is None:
            return self.head(h).float()
        chunks = zip(h.flatten(0, 1).chunk(self.c.loss_chunks), targets.flatten().chunk(self.c.loss_chunks))
        if self.c.loss_chunks > 1 and torch.is_grad_enabled():
            loss = torch.cat([checkpoint(self.token_losses, a, b, use_reentrant=False) for a, b in chunks])
        else:
            loss = torch.cat([self.token_losses(a, b) for a, b in chunks])
        return loss.mean() if reduction == "mean" else loss.view_as(targets)

    def token_losses(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each token in fp32 whatever the compute dtype: a loss in bf16 would step by 0.0156 nat, the size of the bar."""
        return F.cross_entropy(self.head(h).float(), targets, reduction="none")

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, 0.02) everywhere, 0.02/sqrt(2 x applications) on the two projections that write to the stream, norms at 1.

        Drawn on the CPU in a fixed order from a generator of its own, so the same on every device and at every world size.
        """
        g = torch.Generator().manual_seed(seed)
        out_std = 0.02 / math.sqrt(2 * self.c.n_layer * self.c.n_loop)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(1.0)
            else:
                p.normal_(0.0, out_std if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02, generator=g)

    def counts(self) -> dict[str, int]:
        """Parameters: stored (what is trained and saved), active (each block once an application), embedding (table and untied head)."""
        blocks = sum(p.numel() for p in self.blocks.parameters())
        stored = sum(p.numel() for p in self.parameters())
        embedding = self.embed.weight.numel() * (1 if self.c.tied else 2)
        return {"stored": stored, "active": stored + (self.c.n_loop - 1) * blocks, "embedding": embedding}

    def flops_per_token(self, causal: bool = True) -> float:
        """Training FLOPs a token at T = window: forward + twice that backward.

        6 x (matmul parameters, each block once an application) + 12 T n_embd an application for attention (PaLM appendix B),
        halved when causal. torch's own counter counts causal attention as full: causal=False equals it.
        """
        c, applications = self.c, self.c.n_layer * self.c.n_loop
        attn = 2 * c.n_embd**2 * (1 + (c.n_kv_head or c.n_head) / c.n_head)  # q, o; k, v
        matmul = applications * (attn + 3 * c.n_embd * c.ffn_hidden) + c.vocab_size * c.n_embd
        attention = applications * 12 * c.window * c.n_embd
        return 6.0 * matmul + attention * (0.5 if causal else 1.0)


def check_shape(c) -> None:
    """Raise ValueError, in one line, on a model shape that cannot be."""
    if min(c.vocab_size, c.n_layer, c.n_loop, c.n_embd, c.n_head, c.ffn_hidden, c.window) < 1:
        raise ValueError("vocab_size, n_layer, n_loop, n_embd, n_head, ffn_hidden and window must all be at least 1")
    if c.n_embd % c.n_head:
        raise ValueError(f"n_embd = {c.n_embd} is not divisible by n_head = {c.n_head}")
    if c.n_kv_head and c.n_head % c.n_kv_head:
        raise ValueError(f"n_head = {c.n_head} is not divisible by n_kv_head = {c.n_kv_head}")
    if c.n_embd // c.n_head % 2:
        raise ValueError(f"head size n_embd / n_head = {c.n_embd // c.n_head} is odd: rotary embedding needs an even one")
    if c.loop_order not in ("layer", "stack"):
        raise ValueError(f'loop_order = "{c.loop_order}": must be "layer" or "stack"')
    if not c.eps > 0:
        raise ValueError(f"eps = {c.eps}: the residual scale must be positive")


if __name__ == "__main__":
    from train import load_config

    for path in sys.argv[1:] or sys.exit(__doc__):
        config = load_config([path])
        with torch.device("meta"):
            m = Transformer(config)
        n = m.counts()
        print(
            f"{path}: stored {n['stored']:,}, active {n['active']:,}, embedding {n['embedding']:,}, {m.flops_per_token():.4g} FLOPs a token, eps {config.eps:.4f}"
        )
