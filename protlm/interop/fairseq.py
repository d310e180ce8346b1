"""The names of fairseq's transformer, which ESM and RoBERTa checkpoints have in common."""

LAYER = {
    "attention_norm": "self_attn_layer_norm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "feedforward_norm": "final_layer_norm",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
}
HEAD = {"head_transform.dense": "lm_head.dense", "head_transform.norm": "lm_head.layer_norm"}
