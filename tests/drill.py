"""train.py with one thing going wrong, named by the environment variable DRILL. Copied beside the scripts and run in train.py's place."""

import os
import sys
import time
from pathlib import Path

import torch

import guard
import train

WHAT, STEP, FETCH, SAVE = os.environ.get("DRILL", ""), train.train_step, train.fetch, guard.dcp.save


def step(model, opt, data, cfg, number, *rest):
    if WHAT == "slow step":
        time.sleep(0.2)
    if train.RANK == 1 and number == 1 and WHAT == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a drill)")
    if train.RANK == 1 and number == 3 and WHAT == "hang":
        time.sleep(1000)
    if train.RANK == train.WORLD - 1 and number == 3 and WHAT == "nan":
        with torch.no_grad():
            list(model.parameters())[-1][0, 0] = float("nan")  # in the head: every logit
    return STEP(model, opt, data, cfg, number, *rest)


def fetch(data, *rest):
    if WHAT == "slow eval" and len(data) == 6000:
        time.sleep(0.05)
    return FETCH(data, *rest)


def save(*args, **kwargs):
    if WHAT == "slow save":
        time.sleep(1.5)
    if WHAT == "saving":  # so that most of the time is spent in the middle of a save
        time.sleep(0.03)
        SAVE(*args, **kwargs)
        time.sleep(0.03)
    else:
        SAVE(*args, **kwargs)


if __name__ == "__main__":
    train.train_step, train.fetch, guard.dcp.save = step, fetch, save
    if WHAT == "saving":
        rename = Path.rename
        Path.rename = lambda *args: (time.sleep(0.03), rename(*args), time.sleep(0.03))[1]
    train.main(sys.argv[1:])
