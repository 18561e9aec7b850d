"""Host memory whose blocks are copied in short pieces: a piece of 32 MiB is longer than any tensor of a test.

``--piece-bytes 4096`` runs whichever tests are selected with that limit; `make test-all` does so for
streams, swap and host sequences. The fixture `small_pieces` does it for a test in the quick run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SMALL_PIECE_BYTES = 512
"""A fraction of what a layer of a tiny model saves."""


def limit_pieces(patch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Let no pool of this process make blocks with longer pieces."""
    from hf_actswap.engine import host_pool  # here, because the pure tests are quick only without PyTorch

    own = host_pool.Blocks
    patch.setattr(host_pool, "Blocks", lambda longest: own(min(longest, piece_bytes)))


@pytest.fixture(autouse=True, scope="session")
def pieces_asked_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """The limit that was asked for on the command line."""
    asked = request.config.getoption("--piece-bytes")
    with pytest.MonkeyPatch.context() as patch:
        if asked is not None:
            limit_pieces(patch, asked)
        yield


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are copied in pieces of `SMALL_PIECE_BYTES`."""
    limit_pieces(monkeypatch, SMALL_PIECE_BYTES)
