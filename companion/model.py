"""One decoder-only transformer, Llama-style, small enough to read in one sitting.

RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021), grouped-query
attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases. The shapes of the
``llama3-*`` presets are the published ones, so parameter counts are exact.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a :class:`Transformer`."""

    vocabulary: int = 256
    """Number of token ids. Bytes need 256."""
    context: int = 256
    """Longest sequence, in tokens."""
    layers: int = 5
    width: int = 128
    """Size of the residual stream."""
    heads: int = 4
    kv_heads: int = 2
    """Key/value heads; ``heads`` must be a multiple of it."""
    hidden: int = 352
    """Inner size of the SwiGLU feed-forward."""
    dropout: float = 0.0
    tied: bool = True
    """Whether the output head shares the embedding's weight."""
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "width", "heads", "kv_heads", "hidden"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width ({self.width}) must be a multiple of 2 × heads ({2 * self.heads}): "
                "each head has an even size, for rotary positions"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a number from 0 up to, not 1")


MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(),
    "small": ModelConfig(
        context=512, layers=8, width=320, heads=5, kv_heads=5, hidden=880, tied=True
    ),
    "gpt2": ModelConfig(
        vocabulary=50_257, context=1024, layers=12, width=768, heads=12, kv_heads=12, hidden=2048
    ),
    "llama3-8b": ModelConfig(
        vocabulary=128_256, context=8192, layers=32, width=4096, heads=32, kv_heads=8,
        hidden=14_336, tied=False, rope_theta=500_000.0,
    ),
    "llama3-70b": ModelConfig(
        vocabulary=128_256, context=8192, layers=80, width=8192, heads=64, kv_heads=8,
        hidden=28_672, tied=False, rope_theta=500_000.0,
    ),
    "llama3-405b": ModelConfig(
        vocabulary=128_256, context=8192, layers=126, width=16_384, heads=128, kv_heads=8,
        hidden=53_248, tied=False, rope_theta=500_000.0,
    ),
}  # fmt: skip
"""Shapes by name. ``tiny`` has about 1M parameters and trains on two laptop cores."""


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values; ``[B, T, C] -> [B, T, C]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_size = config.width // config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.heads * self.head_size, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(config.heads * self.head_size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        # -1, not the number of heads: under tensor parallelism a rank holds only some of them
        q = self.query(x).view(B, T, -1, self.head_size).transpose(1, 2)
        k = self.key(x).view(B, T, -1, self.head_size).transpose(1, 2)
        v = self.value(x).view(B, T, -1, self.head_size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Tokens ``[B, T]`` (int64) to logits ``[B, T, vocabulary]``.

    Raises:
        ValueError: the sequence is longer than the model's context.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        # not saved: a function of the configuration
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), residual outputs scaled by 1/sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        if T > self.config.context:
            raise ValueError(
                f"the sequence has {T} tokens, the model's context is {self.config.context}: "
                "shorten the sequence or raise the context"
            )
        x = self.embedding(tokens)
        cos, sin = self.cos[:T].to(x.dtype), self.sin[:T].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[context, head_size / 2]`` of the rotary angles."""
    head_size = config.width // config.heads
    frequency = config.rope_theta ** (-torch.arange(0, head_size, 2).float() / head_size)
    angle = torch.outer(torch.arange(config.context).float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of ``x [B, H, T, D]`` by its position's angle.

    Written in real numbers: Inductor has no code generation for complex operators.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; a weight that is shared counts once."""
    return sum(p.numel() for p in model.parameters())


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy in nats, **summed** over the targets other than -100.

    ``batch`` is ``(inputs [B, T], targets [B, T])``; the sum is taken in float32 at least.
    """
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), reduction="sum")
