"""Measurements that others have published, and what ``hf-actswap plan`` predicts for them."""
