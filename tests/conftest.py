"""What holds for every test: fixed seeds, one thread, no deadlines, GPU tests only on a GPU."""

import os

import hypothesis
import pytest
import torch

# Whether an example takes longer than 200 ms says more about the machine's load than about samo.
hypothesis.settings.register_profile("random", deadline=None)
# The same examples each time, so that a change is never red for what another one broke. `make
# test-all` looks for new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")

# Before anything imports the kernels, which Triton either compiles or interprets from then on.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Small tensors gain nothing from a second thread, and two that share a busy machine wait for each
# other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
