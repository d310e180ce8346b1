"""Settings of the model around an attention mechanism."""

from dataclasses import dataclass
from enum import StrEnum

from protlm.config.fields import Checked, above, at_least, setting
from protlm.system.errors import UserError

# How the model encodes positions.
Positions = StrEnum("Positions", ["learned", "sinusoidal", "rotary", "relative"])
# LayerNorm or RMSNorm.
Norm = StrEnum("Norm", ["layer", "rms"])
# What a query-key norm is computed over: each head, or the width of all heads.
QueryKeyWidth = StrEnum("QueryKeyWidth", ["head", "layer"])
# Normalize before a sublayer, or after its residual sum.
NormOrder = StrEnum("NormOrder", ["pre", "post"])
# The feed-forward non-linearity; SwiGLU and GEGLU have a third, gating matrix.
Activation = StrEnum("Activation", ["relu", "gelu", "swiglu", "geglu"])
# The output layer: linear, or after a dense layer, GELU and a norm of the kind of the model's or a
# LayerNorm; an encoder has none.
HeadKind = StrEnum("HeadKind", ["linear", "dense_norm", "dense_layer_norm", "none"])
# What a protein sees of its family in layers of the family: all, or itself and what is before it.
Relatives = StrEnum("Relatives", ["full", "ordered"])
# The positions there: they restart with each protein, are those of aligned residues, or run on.
RelativesPositions = StrEnum("RelativesPositions", ["restart", "aligned", "run"])
# One normalization over the protein and its relatives, or one for each.
RelativesSum = StrEnum("RelativesSum", ["joint", "apart"])


@dataclass(frozen=True)
class Frame:
    """The tokens around the residues of a protein, and tokens of a model after those of protlm.

    Attributes:
        has_mask: whether the model was trained with `<mask>`.
    """

    prefix: tuple[str, ...] = ("<cls>",)
    suffix: tuple[str, ...] = ("<eos>",)
    own_tokens: tuple[str, ...] = ()
    has_mask: bool = True


@dataclass
class ModelConfig(Checked):
    """The transformer around an attention mechanism."""

    _section = "model."

    num_layers: int = setting("blocks of attention and feed-forward", allowed=at_least(1))
    num_heads: int = setting("attention heads; they divide `model_dim`", allowed=at_least(1))
    model_dim: int = setting("width of the residual stream", allowed=at_least(1))
    feedforward_dim: int = setting("width inside the feed-forward", allowed=at_least(1))
    max_length: int = setting(
        "the longest input of learned positions, and of mechanisms with tables of positions; "
        "without either there is no limit, and rows have `data.max_length`",
        1024,
        allowed=at_least(3),
    )
    positions: Positions = setting("position encoding", Positions.learned)
    relative_buckets: int = setting(
        "of `positions=relative`: its biases",
        32,
        allowed=at_least(4),
        used_with="model.positions=relative",
    )
    relative_distance: int = setting(
        "of `positions=relative`: from there, all distances have one bias",
        128,
        allowed=at_least(2),
        used_with="model.positions=relative",
    )
    head_dim: int | None = setting(
        "width of a head; `null`: `model_dim` / `num_heads`", None, allowed=at_least(1)
    )
    norm: Norm = setting("normalization", Norm.layer)
    norm_order: NormOrder = setting(
        "norm before a sublayer, or after the residual sum", NormOrder.pre
    )
    norm_epsilon: float | None = setting(
        "added to the variance in the norms of hidden states; "
        "`null`: 1e-5 for `layer`, 1e-6 for `rms`",
        None,
        allowed=above(0),
    )
    activation: Activation = setting("nonlinearity of the feed-forward", Activation.relu)
    qk_norm: bool = setting(
        "normalizes queries and keys in the way that suits the mechanism (docs/train.md)", False
    )
    qk_norm_width: QueryKeyWidth = setting(
        "with `qk_norm=true`: `layer` is a LayerNorm over the width of all heads, as in ESM C",
        QueryKeyWidth.head,
    )
    attention_bias: bool = setting(
        "biases in the projections to queries, keys, values and output", False
    )
    embedding_norm: bool = setting("a norm after the embedding and its positions", False)
    token_dropout: bool = setting(
        "zeroes the embedding of `<mask>` and scales the other tokens of the row, as in ESM", False
    )
    head: HeadKind = setting(
        "the output layer: linear, or dense, GELU and norm before it, which is a LayerNorm with "
        "`dense_layer_norm`; `none` of imported encoders",
        HeadKind.linear,
    )
    tied_head: bool = setting("the output layer uses the weights of the token embedding", False)
    stored_frequencies: bool = setting(
        "saves the frequencies of `positions=rotary` with the weights, as imported models need",
        False,
    )
    global_every: int = setting(
        "each n-th layer has the rotary base `global_base`, as in E1", 0, allowed=at_least(0)
    )
    global_base: float = setting(
        "base of the rotary frequencies there; otherwise it is 10,000", 5e5, allowed=above(0)
    )
    relatives: Relatives | None = setting(
        "what a protein sees of its family, of `data.batching=relatives`: `full`, all of it, or "
        "`ordered`, itself and the proteins before it; `null`: `full`, or `ordered` if causal",
        None,
        used_with="data.batching=relatives",
    )
    relatives_every: int = setting(
        "each n-th layer sees the family; the others see the protein",
        1,
        allowed=at_least(1),
        used_with="data.batching=relatives",
    )
    relatives_positions: RelativesPositions = setting(
        "the positions of layers that see the family: they `restart` with each protein, are those "
        "of `aligned` residues of the query, or `run` from the start of the family",
        RelativesPositions.restart,
        used_with="data.batching=relatives",
    )
    relatives_sum: RelativesSum = setting(
        "one normalization over a protein and its relatives, or `apart`, where that over relatives "
        "is added through a learned factor of each head, first 0",
        RelativesSum.joint,
        used_with="data.batching=relatives",
    )
    relatives_heads: int = setting(
        "extra heads in each layer of the family, which see nothing but aligned residues of "
        "relatives; their output starts at 0, and the other heads see the protein alone; 0: none",
        0,
        allowed=at_least(0),
        used_with="data.batching=relatives",
    )
    relatives_around: int = setting(
        "how far from its own position a head of `relatives_heads` sees relatives",
        8,
        allowed=at_least(0),
        used_with="data.batching=relatives",
    )
    relatives_numbers: int = setting(
        "rows of a table of the numbers of proteins in their family, added to the embedding, as in "
        "E1; 0: none",
        0,
        allowed=at_least(0),
        used_with="data.batching=relatives",
    )
    qkv_clip: float | None = setting(
        "bound of queries, keys and values before their positions, as in E1", None, allowed=above(0)
    )
    dropout: float = setting(
        "after attention, feed-forward and embedding", 0.0, allowed=at_least(0, below=1)
    )
    convolution: int | None = setting(
        "width of a depthwise convolution before each attention; odd, 3 to 31, usually 5", None
    )
    output_gate: bool = setting("normalizes each head's output and multiplies it by a gate", False)
    value_embedding: bool = setting(
        "adds an embedding of the tokens to the values of each layer", False
    )
    unet_skips: bool = setting(
        "adds the input of each early block to the input of the matching late block", False
    )
    feedforward_chunk: int | None = setting(
        "positions that the feed-forward computes at a time", None, allowed=at_least(1)
    )
    init_from: str | None = setting(
        "a run, checkpoint, exported or foreign model of the same architecture, whose weights "
        "training starts from",
        None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution is not None and self.convolution not in range(3, 33, 2):
            raise UserError(
                f"model.convolution={self.convolution} must be an odd number of positions, 3 to "
                "31; type model.convolution=5, or null for none"
            )
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise UserError(
                f"model.model_dim={self.model_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}; choose one that is, or model.head_dim=WIDTH"
            )
        if 4 * self.relative_distance <= self.relative_buckets:
            raise UserError(
                f"model.relative_distance={self.relative_distance} must be more than a quarter of "
                f"model.relative_buckets={self.relative_buckets}"
            )
        for name in ("stored_frequencies", "global_every"):
            if (value := getattr(self, name)) and self.positions is not Positions.rotary:
                given = f"model.{name}={str(value).lower()}"
                raise UserError(f"{given} needs model.positions=rotary, not {self.positions}")
        self._check_relatives()
        if self.qk_norm_width is QueryKeyWidth.layer and not self.qk_norm:
            raise UserError("model.qk_norm_width=layer needs model.qk_norm=true")

    def _check_relatives(self) -> None:
        """Refuses settings of relatives that exclude each other."""
        if self.relatives is None:
            return
        if self.positions is Positions.relative:
            raise UserError(
                "model.positions=relative has biases within a protein, and none for "
                "model.relatives; choose model.positions=rotary, or rows without families, "
                "data.batching=packed"
            )
        if self.relatives_positions is RelativesPositions.run and self.has_position_table:
            raise UserError(
                f"model.relatives_positions=run has no rows in the table of model.positions="
                f"{self.positions}; choose restart, or model.positions=rotary"
            )
        if self.relatives_heads and (
            self.relatives_sum is RelativesSum.apart
            or self.relatives_positions is RelativesPositions.run
        ):
            raise UserError(
                "model.relatives_heads are apart from the other heads, and see the same positions "
                "of relatives; leave model.relatives_sum out, and type "
                "model.relatives_positions=restart or aligned"
            )
        if self.global_every and self.relatives_every != self.global_every:
            raise UserError(
                f"model.relatives_every={self.relatives_every} must be "
                f"model.global_every={self.global_every}, as in E1"
            )

    def sees_family(self, layer: int) -> bool:
        """Returns whether a layer, from 1, sees the family."""
        return self.relatives is not None and layer % self.relatives_every == 0

    @property
    def has_position_table(self) -> bool:
        """Whether there is a row for each position, up to `max_length`."""
        return self.positions in (Positions.learned, Positions.sinusoidal)

    @property
    def width_of_head(self) -> int:
        """The width of the queries and keys of a head."""
        return self.head_dim or self.model_dim // self.num_heads
