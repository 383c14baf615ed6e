"""Who runs in a step, with which pages, and what came back of it: pure policy and bookkeeping, no I/O, no torch.

`scheduler.py` is the whole seen from `engine.py`; the other modules are its parts and know nothing of it.
"""
