"""docs/reliability.md: what a run does when something goes wrong, and what the matrix of `bench.chaos` saw."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

import codmd
from bench.sitting import LIMIT
from codmd.engine import guard
from codmd.engine.heartbeat import BEAT, CUT_OFF, LOST, PATIENCE
from codmd.engine.signals import ONCE

HEAD = ("run, cut and accident", "verdict", "largest difference", "what was seen")


def page(rows: Sequence[tuple[str, ...]], about: str) -> str:
    """The page, with a row for each cell."""
    return PAGE.format(
        table="\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ("---",) * len(HEAD), *rows]),
        passed=sum(row[1] == "passed" for row in rows),
        count=len(rows),
        about=about,
        refusals=guard.LIMIT,
        once=ONCE,
        patience=PATIENCE,
        cut_off=CUT_OFF * BEAT,
        lost=LOST,
        limit=LIMIT,
        versions=f"codmd {codmd.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, one thread a process",
    )


PAGE = """\
# When something goes wrong

The same command on the same folder goes on with a run. It does so after Ctrl-C, after a crash, a lost machine or a
full disk, and what comes out is what would have come out: losses, gradient norms, the student, the fake network, the
average, the optimizers, and the streams of prompts and noise are the same bit for bit on the same number of ranks. On
another number of ranks the streams are the same, and the rest up to rounding: the table below says how far.

## Exit codes

| code | meaning | what to do |
| ---: | --- | --- |
| 0 | done | |
| 2 | something that you can mend; one line says what | mend it, then the same command |
| 3 | {refusals} steps in a row whose loss or gradient was not finite | lower the rates, or look at the samples named |
| 4 | another rank is lost, and named | the same command |
| 130 | Ctrl-C (SIGINT) | the same command |
| 143 | SIGTERM | the same command |

These are a rank's own. torchrun ends with 1 whenever a rank did not end with 0, and its report names the ranks' codes.

## What happens when

**SIGTERM or Ctrl-C, to any one rank.** All ranks agree to end after the step that they are in, commit a checkpoint and
exit. A validation that is due at that step is still made; a run that is still loading ends at once. Asked again more
than {once:g} seconds later, a process stops at once; signals that arrive together count as one, since schedulers signal
every process and torchrun passes its own on as well. torchrun waits 30 seconds for its ranks and then kills them: where
a checkpoint takes longer to write, give it `--shutdown-timeout`. A signal in the very last step changes nothing: the
run is done, and exits with 0.

**A rank dies, or its machine.** torchrun ends the others on the same machine at once. Everywhere else each rank looks
for the others' signs of life: {patience:.0f} seconds after the last of them, or {cut_off:.0f} where the connection
broke, it says which rank is lost, and exits with code {lost}. Nobody waits in a collective for ever.

**torchrun --max-restarts=N** starts all ranks anew when one has failed, at most N times, and the run goes on from its
newest checkpoint by itself. It does not look at codes: it also restarts a run that has ended with 2 or 3, or that
SIGTERM to a single rank has ended. SIGTERM or Ctrl-C to torchrun itself ends the run for good.

**The disk is full when a checkpoint is written.** The run says so, deletes what was half written, keeps the checkpoints
that are there, and goes on; the next one may find room. Lines of metrics.jsonl that found none are written later. Only
the last checkpoint has to be written: where it cannot, the run exits with code 2, and the same command goes on from the
one before it. It is the same where the disk of a single rank is full.

**A checkpoint is damaged.** Each has a manifest with the size and SHA-256 of every file. Before a run goes on, its
newest checkpoint is compared with it; one that is not as it was written is named, with the file, and set aside as
`damaged-step-...`, and the one before it is used. Where all are damaged, the run refuses to begin anew in silence.

**A process is killed while it writes.** A checkpoint is written beside its place, synced, given its manifest, synced
again, and renamed; only then `latest` moves, and only then older ones are deleted (`train.keep`). So what is there is
whole. With `train.asynchronous` the same happens while the training goes on. Nothing in a run's folder is pickled.

**A loss or gradient is not finite**, on whatever rank: no rank updates anything, and the step's line in metrics.jsonl
says so in `refused`, with the samples' ids in `refused_samples` and their `seed`.

## Seen

{passed} of {count} cells passed. Written by `python -m bench.chaos --report docs/reliability.md` (`make chaos`); each
cell runs the command line on the shipped miniature, is harmed from outside, is run again, and is compared with a run
that nobody disturbed: each line of metrics.jsonl, and every tensor of the last checkpoint.

{table}

- {about}
- the student learns at every third step, the first among them: a cut "after a student's update" is one at checkpoint 4,
  "between two" one at checkpoint 5
- on another number of ranks, a loss of the trained miniature magnifies fp32's rounding some ten times; the rows in fp64
  show that it is rounding and no more
- undisturbed runs write their checkpoints while they wait; a sitting of more than {limit:.0f} seconds counts as hanging
- {versions}
"""
