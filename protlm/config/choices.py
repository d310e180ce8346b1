"""The choices of settings; the members have the names that the YAML files use."""

from enum import StrEnum


class Positions(StrEnum):
    """How the model encodes positions."""

    learned = "learned"
    sinusoidal = "sinusoidal"
    rotary = "rotary"


class Norm(StrEnum):
    """LayerNorm or RMSNorm."""

    layer = "layer"
    rms = "rms"


class QueryKeyWidth(StrEnum):
    """What a query-key norm is computed over: each head, or the width of all heads."""

    head = "head"
    layer = "layer"


class NormOrder(StrEnum):
    """Normalize before a sublayer, or after its residual sum."""

    pre = "pre"
    post = "post"


class Activation(StrEnum):
    """The feed-forward non-linearity; SwiGLU has a third, gating matrix."""

    relu = "relu"
    gelu = "gelu"
    swiglu = "swiglu"


class HeadKind(StrEnum):
    """The output layer: linear, or after a dense layer, GELU and a norm."""

    linear = "linear"
    dense_norm = "dense_norm"


class Objective(StrEnum):
    """The prediction task: masked residues, or the next residue."""

    masked = "masked"
    causal = "causal"


class DistillationStage(StrEnum):
    """What a model learns from its teacher: the outputs of its attention, or its predictions."""

    attention = "attention"
    logits = "logits"


class Crop(StrEnum):
    """The part of a sequence that is kept when it is cropped."""

    prefix = "prefix"
    random = "random"


class Mode(StrEnum):
    """A row of a batch: one sequence, or several, joined by `<eos>`."""

    sequences = "sequences"
    concatenated = "concatenated"


class Sampling(StrEnum):
    """The samples of an epoch: every sequence, or one sequence from every cluster."""

    uniform = "uniform"
    cluster = "cluster"


class Verify(StrEnum):
    """How shards are verified at the start: by hash, or by size alone."""

    full = "full"
    sizes = "sizes"


class Schedule(StrEnum):
    """The learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


class DecayShape(StrEnum):
    """The decay of the learning rate of `wsd`: linear, or as 1 - √."""

    linear = "linear"
    sqrt = "sqrt"


class Optimizer(StrEnum):
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""

    adamw = "adamw"
    muon = "muon"


class BestMetric(StrEnum):
    """The validation metric by which the best checkpoints are chosen."""

    valid_loss = "valid_loss"
    valid_accuracy = "valid_accuracy"


class OnSaveError(StrEnum):
    """What a run does when a checkpoint cannot be saved: warn and train on, or stop."""

    warn = "warn"
    stop = "stop"


class WandbMode(StrEnum):
    """Whether Weights & Biases is used, and whether it may use the network."""

    off = "off"
    offline = "offline"
    online = "online"
