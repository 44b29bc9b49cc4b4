"""The example of the guide "CUDA graphs", and PyTorch's own allocations beside a pool's."""

import gc
from pathlib import Path

import pytest

import ringmem

pytestmark = pytest.mark.cuda
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "graphs.md"


@pytest.fixture
def torch():
    if not ringmem.devices("cuda"):
        pytest.skip("needs a CUDA device")
    return pytest.importorskip("torch")


def test_the_example_of_the_guide_runs(torch):
    (code,) = [part.split("```")[0] for part in GUIDE.read_text().split("```python\n")[1:]]
    names = {}
    exec(compile(code, GUIDE, "exec"), names)
    names["graph"].replay()
    torch.cuda.synchronize()
    assert names["x"].cpu().tolist() == [6.0] * 1024


def test_a_graph_of_pytorch_is_captured_while_pools_work(torch):
    """Its capture mode is the global one, and its default."""
    device = ringmem.Device("cuda:0")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side = device.create_stream()
    x = torch.ones(1000, device="cuda:0")
    torch.cuda.synchronize()
    with ringmem.Pool(device) as pool, ringmem.PinnedPool(device) as pinned:
        with torch.cuda.graph(graph, stream=stream):
            y = x * 2
            for nbytes in (256, 3 << 20, 50 << 20):
                pool.allocate(nbytes, side).close(side)
                pinned.allocate(nbytes, side).close(side)
                with ringmem.empty(nbytes, "uint8", device=device, stream=side) as buffer:
                    buffer.fill(7)
                    assert buffer.to_numpy().min() == 7
            scratch = pool.empty(1000, "float32", stream=stream)
            z = torch.from_dlpack(scratch)
            torch.mul(y, 5, out=z)
            gc.collect()
        for value in (1, 3):
            x.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert z.cpu().tolist() == [10.0 * value] * 1000
        del z, graph
        scratch.close()
        side.synchronize()
