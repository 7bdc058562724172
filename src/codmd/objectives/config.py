"""Which objective, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from codmd.errors import UserError
from codmd.schema import check_number, nearest, show

METHOD_NAMES = ("dmd", "codmd", "batch", "frame", "direct", "mse")
SPACES = ("x0", "score")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The defaults are the paper's."""

    method: str = "codmd"
    batch_weight: float = 0.1  # lambda_batch of Eq. 11
    frame_weight: float = 0.1  # lambda_frame of Eq. 11
    tau: float = 0.1  # temperature of the row softmax in Eq. 8
    space: str = "x0"  # what S_real and S_fake are built from (R2)
    pool_grid: int = 1  # features are means over space (R3), or over each of n x n cells of it
    release_batch_scaling: bool = False  # 1/world-size of the batch term, as in the authors' release (R11)

    def __post_init__(self) -> None:
        for key, value, known in (("method", self.method, METHOD_NAMES), ("space", self.space, SPACES)):
            if value not in known:
                raise UserError(f"{key}: unknown {show(value)}, {nearest(value, known)}")
        check_number("batch_weight", self.batch_weight, at_least=0)
        check_number("frame_weight", self.frame_weight, at_least=0)
        check_number("tau", self.tau, above=0)
        check_number("pool_grid", self.pool_grid, at_least=1)
        if self.method == "direct" and self.space == "score":
            raise UserError('space: "score" does not go with method "direct", which compares with x: use "x0"')
