"""Copula-aware distribution matching distillation: makes few-step video models of many-step ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codmd.relations import relational_loss

__version__ = "0.1.0"
__all__ = ["__version__", "relational_loss"]


def __getattr__(name: str) -> Any:
    """`codmd.relational_loss` loads torch when it is first asked for, so that `codmd --help` needn't."""
    if name == "relational_loss":
        from codmd.relations import relational_loss

        return relational_loss
    raise AttributeError(f"module 'codmd' has no attribute {name!r}")
