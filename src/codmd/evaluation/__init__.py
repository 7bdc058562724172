"""Measuring models: the miniature's benchmark."""

from codmd.evaluation.mini_benchmark import compare, is_open, score
from codmd.evaluation.mini_measures import MEASURES, QUALITY, SEMANTIC
from codmd.evaluation.mini_prompts import evaluation_prompts, open_prompts
from codmd.evaluation.mini_report import report, rows, table
from codmd.evaluation.mini_scores import MiniScores, totals
from codmd.evaluation.run import run_mini

__all__ = [
    "MEASURES", "QUALITY", "SEMANTIC", "MiniScores", "compare", "evaluation_prompts", "is_open",
    "open_prompts", "report", "rows", "run_mini", "score", "table", "totals",
]  # fmt: skip
