"""The choices of settings; the members have the names that the YAML files use."""

from enum import StrEnum

# How the model encodes positions.
Positions = StrEnum("Positions", ["learned", "sinusoidal", "rotary"])
# LayerNorm or RMSNorm.
Norm = StrEnum("Norm", ["layer", "rms"])
# What a query-key norm is computed over: each head, or the width of all heads.
QueryKeyWidth = StrEnum("QueryKeyWidth", ["head", "layer"])
# Normalize before a sublayer, or after its residual sum.
NormOrder = StrEnum("NormOrder", ["pre", "post"])
# The feed-forward non-linearity; SwiGLU has a third, gating matrix.
Activation = StrEnum("Activation", ["relu", "gelu", "swiglu"])
# The output layer: linear, or after a dense layer, GELU and a norm.
HeadKind = StrEnum("HeadKind", ["linear", "dense_norm"])
# The prediction task: masked residues, or the next residue.
Objective = StrEnum("Objective", ["masked", "causal"])
# What a model learns from its teacher: the outputs of its attention, or its predictions.
DistillationStage = StrEnum("DistillationStage", ["attention", "logits"])
# The part of a sequence that is kept when it is cropped.
Crop = StrEnum("Crop", ["prefix", "random"])
# A row of a batch: one sequence, or several, joined by `<eos>`.
Mode = StrEnum("Mode", ["sequences", "concatenated"])
# The samples of an epoch: every sequence, or one sequence from every cluster.
Sampling = StrEnum("Sampling", ["uniform", "cluster"])
# How shards are verified at the start: by hash, or by size alone.
Verify = StrEnum("Verify", ["full", "sizes"])
# The learning rate after warm-up.
Schedule = StrEnum("Schedule", ["constant", "cosine", "wsd"])
# The decay of the learning rate of `wsd`: linear, or as 1 - √.
DecayShape = StrEnum("DecayShape", ["linear", "sqrt"])
# AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.
Optimizer = StrEnum("Optimizer", ["adamw", "muon"])
# The validation metric by which the best checkpoints are chosen.
BestMetric = StrEnum("BestMetric", ["valid_loss", "valid_accuracy"])
# What a run does when a checkpoint cannot be saved: warn and train on, or stop.
OnSaveError = StrEnum("OnSaveError", ["warn", "stop"])
# Whether Weights & Biases is used, and whether it may use the network.
WandbMode = StrEnum("WandbMode", ["off", "offline", "online"])
