"""PyTorch beside a ring kernel that never stops. Run by test_by_force in a process of its own, so that
what hangs can be ended. Usage: coexist.py DEVICE; prints "done" and what was done last.

A first launch of a kernel that is not loaded yet waits for the ring kernel: the program asks for
``CUDA_MODULE_LOADING=EAGER`` before CUDA starts, and what is generated while it runs (torch.compile)
is used once before the ring kernel is launched, or while it has ended: both are shown.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time

import handlers_for_tests as h
import torch

from ringmem import RingKernel


def network(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
    ).to(device)
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    device = next(model.parameters()).device
    x = torch.randn(256, 64, device=device)
    y = x[:, :1] * 2 - x[:, 1:2]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    last = loss.item()
    assert math.isfinite(last)
    return last


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """torch.compile where it works here, else a trace."""
    x = torch.randn(256, 64, device=next(model.parameters()).device)
    with contextlib.suppress(Exception):
        found = torch.compile(model)
        found(x)
        return found
    return torch.jit.trace(model, x)


def say(what: str) -> None:
    print(f"{time.perf_counter():.3f} {what}", flush=True)


def main(name: str) -> None:
    device = torch.device("cuda" if name.startswith("cuda") else "cpu")
    model, optimizer = network(device)
    fast = compiled(model)
    for one in (fast, model):
        train(one, optimizer, 3)  # every kernel of the loop is loaded now
    say("warm")
    calls = 0
    done = threading.Event()
    with RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device=name, deadline_s=45.0) as kernel:

        def caller() -> None:
            nonlocal calls
            while not done.is_set():
                assert kernel.call((calls, 1), timeout_s=10)["total"] == calls + 1
                calls += 1

        thread = threading.Thread(target=caller)
        thread.start()
        try:
            say("allocate")
            blocks = [torch.zeros(1 << 20, device=device) for _ in range(16)]
            host = blocks[0].cpu()
            assert float(host.sum()) == 0
            say("train, compiled")
            before = train(fast, optimizer, 1)
            assert train(fast, optimizer, 100) < before
            say("train, eager")
            train(model, optimizer, 20)
            say("copies")
            if device.type == "cuda":
                pinned = torch.ones(1 << 20, pin_memory=True)
                blocks[1].copy_(pinned, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                assert float(blocks[1][0]) == 1
        finally:
            done.set()
            thread.join(20)
        assert calls > 10
        say(f"{calls} calls beside it")
    # A new graph: compiled while no ring kernel runs, used beside the next one.
    other, optimizer = network(device)
    other = compiled(other)
    train(other, optimizer, 3)
    with RingKernel(h.add, message=h.PAIR, reply=h.TOTAL, device=name, deadline_s=30.0) as kernel:
        say("train beside the second kernel")
        train(other, optimizer, 10)
        assert kernel.call((1, 2), timeout_s=10)["total"] == 3
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])
