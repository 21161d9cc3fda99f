"""A process group of this process alone, and links between transports of this process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from samo.pipeline.transport.connect import neighbours_of
from samo.pipeline.transport.tcp import Link, Transport
from tests.pipeline.local import Network, ends


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def network() -> Iterator[Network]:
    """Return a function that links ranks over TCP."""
    made: list[Transport] = []

    def make(num_ranks: int, *, is_ring: bool = False) -> list[Transport]:
        places = range(num_ranks)
        links: dict[int, dict[int, Link]] = {place: {} for place in places}
        for a in places:
            for b in neighbours_of(a, num_ranks, is_ring):
                if a < b:
                    links[a][b], links[b][a] = ends()
        found = [Transport(place, places, links[place]) for place in places]
        made.extend(found)
        return found

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def pair(network: Network) -> list[Transport]:
    return network(2)
