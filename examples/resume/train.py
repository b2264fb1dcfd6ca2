"""Trains with dropout, and saves a checkpoint every third step, in which something is missing:
`verify replay train.py --out {run} --resume-args "--resume {run}/last.pt"` says what.
"""

import argparse

import torch

import verify

options = argparse.ArgumentParser()
options.add_argument("--out", default=".")
options.add_argument("--resume")
args = options.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]  # and the generator?

with verify.record("run", model, optimizer):  # behind loading, around all steps
    for step in range(first, 12):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 3 == 2:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "step": step + 1}, f"{args.out}/last.pt")
