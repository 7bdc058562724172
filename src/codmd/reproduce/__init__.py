"""The paper's ablation and its sweep of λ, in the miniature: runs, paired statistics, the report."""

from codmd.reproduce.command import run
from codmd.reproduce.plan import VARIANTS, Plan, Variant

__all__ = ["VARIANTS", "Plan", "Variant", "run"]
