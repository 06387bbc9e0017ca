"""Profiles and pictures that the tests of tuning stand on."""

from __future__ import annotations

import pytest

from mammoth_operator.tuning.profile import Profile
from mammoth_operator.tuning.samples import Ask
from mammoth_operator.tuning.traces import Phase, arrivals

SMALL, MEDIUM = (256, 256), (512, 512)


@pytest.fixture
def profile() -> Profile:
    """A device that batches small pictures well and larger ones not at all."""
    return Profile(
        hardware="test",
        versions="1",
        dit_step_ms={SMALL: {1: 5.2, 2: 8.2, 4: 15.8, 8: 32.3}, MEDIUM: {1: 12.4, 2: 27.1, 4: 53.5, 8: 103.0}},
        dit_picture_ms={SMALL: 8.0, MEDIUM: 24.0},
        ar_decode_ms={1: {1: 3.7, 32: 3.8}, 2048: {1: 3.7, 32: 3.8}},
        ar_prefill_ms={32: 8.0, 512: 20.0},
    )


@pytest.fixture
def small_load() -> list[Ask]:
    """More small pictures than one at a time could be drawn."""
    return arrivals([Phase(1200, 4.4, {256: 1})], seed=5)


@pytest.fixture
def medium_load() -> list[Ask]:
    """Fewer medium pictures than one at a time can be drawn, more than eight at a time could."""
    return arrivals([Phase(2400, 1.42, {512: 1})], seed=6)
