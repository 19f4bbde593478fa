"""Models, tokenizers and trainers of Hugging Face: what `train.preset: hf-causal` and `hf-pairs`
train, and `ElasticMixin` for a Trainer of your own.

Needs the extra `hf`, which is imported where it is used. Never asks a hub, and runs no code of a
folder.
"""
