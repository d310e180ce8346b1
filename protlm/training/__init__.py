"""Training with Lightning: module, data, objective, callbacks, checkpoints."""
