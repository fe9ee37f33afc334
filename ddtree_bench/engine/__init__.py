"""The tensor-parallel engine: sequences, paged caches, scheduler, and the decoding round (DESIGN section 4.2).

Reading order: request and settings (the border), round (the method at work), sampling with noise and penalties,
sequence and text_stream (where a request ends), scheduler with page_pool and memory, runner with kv_caches, prefill,
digest, engine (one rank), ranks, worker and handle (all ranks). Importing this package does not import torch.
"""
