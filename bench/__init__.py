"""Measurements that print ratios, each measured in one run: `python -m bench` (or `make bench`)."""
