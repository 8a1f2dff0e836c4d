"""Page tables on a CUDA device: a flush neither waits for the device nor is overtaken by the next one."""

from __future__ import annotations

import pytest
import torch

from polyattn.serving import PageAllocator, RequestTable

from .syncs import no_sync


@pytest.fixture(autouse=True)
def gpu(device):
    device("cuda", what="page tables on a device")


def test_flushes_that_wait_on_the_device_keep_their_numbers():
    table = RequestTable(4, 4096, 1, (-1, 99), [PageAllocator(20_000) for _ in range(2)], "cuda")
    rows = [table.add() for _ in range(3)]
    kept = []
    with no_sync():
        for _ in range(6):
            torch.cuda._sleep(20_000_000)
            for row in rows:
                table.extend(row, 500 + row)
                table.slide(row)
            table.flush()
            host = [[table.pages(row, group) for row in rows] for group in range(2)]
            kept.append((host, [t.clone() for t in table.tables]))
    for host, device in kept:
        for pages, found in zip(host, device, strict=True):
            for row, expected in zip(rows, pages, strict=True):
                assert found[row, : len(expected)].tolist() == expected
                assert not found[row, len(expected) :].any()
    table.check()
