"""What the miniature's text encoder must read in a caption: which words belong to which object.

Wan's UMT5 knows language before the transformer meets it. A text encoder that learns from scratch, by flow matching
alone, tells red from green and "left of" from "above" early, and for very long nothing of which object is which: of
"a red circle left of a blue square" it draws all four combinations and both orders. So it is also asked outright:
each word of an object's phrase must tell that object's place, colour and shape.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from codmd.mini.world import COLOURS, RELATIONS, SHAPES

UNSAID = "unsaid"
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
ANSWERS = ((UNSAID, *RELATIONS), (UNSAID, *COLOURS), (UNSAID, *SHAPES))  # place, colour, shape
NOT_ASKED = -100


def questions(caption: str, slots: int) -> Int[Tensor, "slots 3"]:
    """The right answers for each word (and comma) of a caption; `NOT_ASKED` for words that are of no object."""
    head = caption.partition(",")[0].split()
    nouns = [i for i, word in enumerate(head) if word in SHAPES or word == "shape"]
    relation = next((r for r in RELATIONS if f" {r} " in caption and len(nouns) > 1), UNSAID)
    answers = torch.full((slots, len(ANSWERS)), NOT_ASKED)
    for number, noun in enumerate(nouns):
        first = 0 if number == 0 else max(i for i in range(noun) if head[i] in ("a", "an"))
        phrase = head[first : noun + 1]
        place = relation if number == 0 or relation == UNSAID else OPPOSITE[relation]
        said = (
            place,
            next((w for w in phrase if w in COLOURS), UNSAID),
            next((w for w in phrase if w in SHAPES), UNSAID),
        )
        right = [options.index(word) for options, word in zip(ANSWERS, said, strict=True)]
        answers[first : noun + 1] = torch.tensor(right)
    return answers


class Reading(nn.Module):
    """Asks a text encoder's embeddings these questions; used in training alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, len(options)) for options in ANSWERS)

    def forward(self, tokens: Float[Tensor, "B K D"], right: Int[Tensor, "B K 3"]) -> Float[Tensor, ""]:
        """The mean over words of the answers' cross-entropy, summed over place, colour and shape."""
        words = (right[..., 0] != NOT_ASKED).sum().clamp(min=1)  # a batch may ask nothing
        wrong = [
            nn.functional.cross_entropy(head(tokens).float().flatten(0, 1), right[..., i].flatten(), reduction="sum")
            for i, head in enumerate(self.heads)
        ]
        return torch.stack(wrong).sum() / words
