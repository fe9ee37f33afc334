"""Models: target (Qwen3), drafter (DFlash), their weights, tokenizer and training.

Reading order: parallel, layers, qwen3, dflash, weights, tokenizer, then training/.
Importing this package does not import torch.
"""
