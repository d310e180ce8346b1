"""What a trained model knows: accuracy, perplexity, contacts."""
