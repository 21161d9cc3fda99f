from collections.abc import Iterator

import pytest
import torch

from samo.kernels import Kernels
from tests.kernels.cases import DEVICES, IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Each implementation, with its device as the default one."""
    with torch.device(DEVICES.get(request.param, torch.device("cpu"))):
        yield IMPLEMENTATIONS[request.param]
