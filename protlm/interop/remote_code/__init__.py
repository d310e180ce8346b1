"""The code of exported models, which transformers runs without protlm."""
