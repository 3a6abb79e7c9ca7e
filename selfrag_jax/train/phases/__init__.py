"""The phases of training: each is data, one pure step, and an evaluation, run by `train/loop.py`."""
