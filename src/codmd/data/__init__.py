"""Prompts, and the streams of random numbers that a run is made of."""
