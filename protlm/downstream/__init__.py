"""Uses of a trained model: the effects of variants."""
