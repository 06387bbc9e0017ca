"""Messages of a stream to events and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mammoth_client import DataLoss, Done, Picture
from mammoth_client._events import EventReader
from mammoth_client._fake import events
from mammoth_wire.params import Defaults, resolve_generation
from mammoth_wire.v1 import diffusion_pb2
from mammoth_wire.v1.image_generation_pb2 import GenerateEvent

GENERATION = replace(
    resolve_generation({"prompt": "a mammoth"}, defaults=Defaults(height=16, width=16, steps=2)), seed=5
)


def messages(num_images: int = 1) -> list[GenerateEvent]:
    return list(events(replace(GENERATION, num_images=num_images), model_digest="", chunk_bytes=50))


def renumbered(changed: list[GenerateEvent]) -> list[GenerateEvent]:
    for sequence, message in enumerate(changed):
        message.sequence = sequence
    return changed


def read(stream: list[GenerateEvent], num_images: int = 1) -> list[object]:
    reader = EventReader(num_images)
    found = [event for message in stream for event in reader.read(message)]
    reader.finish()
    return found


def images(stream: list[GenerateEvent]) -> list[int]:
    """Places of the messages that hold image chunks."""
    return [place for place, message in enumerate(stream) if message.HasField("image")]


def test_a_stream_becomes_events_and_then_the_picture():
    names = [type(event).__name__ for event in read(messages())]
    assert names == [
        "Accepted", "Queued", "ArProgress", "ArProgress", "ArProgress", "Conditioned", "Batched", "Step", "Step", "Done",
        "Picture",
    ]  # fmt: skip


def test_chunks_are_put_together():
    whole = list(events(GENERATION, model_digest="", chunk_bytes=10**6))
    assert len(images(whole)) == 1
    assert len(images(messages())) > 1
    assert read(messages())[-1] == read(whole)[-1]


def test_done_and_picture_agree():
    done, picture = read(messages())[-2:]
    assert isinstance(done, Done)
    assert isinstance(picture, Picture)
    assert (picture.receipt, picture.times) == (done.receipt, done.times)


def test_pictures_may_arrive_interleaved():
    stream = messages(num_images=2)
    mixed = sorted(stream, key=lambda message: (message.HasField("done"), message.image.offset))
    found = read(renumbered(mixed), num_images=2)
    pictures = {event.image_index: event.png for event in found if isinstance(event, Picture)}
    assert pictures == {event.image_index: event.png for event in read(messages(2), 2) if isinstance(event, Picture)}


def test_a_picture_that_another_replica_draws_again_replaces_what_came_before():
    stream = messages()
    first = images(stream)[0]
    lost = GenerateEvent(image=diffusion_pb2.ImageChunk(offset=0, total_bytes=99, data=b"half of a picture"))
    assert read(renumbered([*stream[:first], lost, *stream[first:]]))[-1] == read(messages())[-1]


def test_an_event_of_a_newer_server_is_passed_over():
    stream = messages()
    assert read(renumbered([stream[0], GenerateEvent(), *stream[1:]])) == read(messages())


def without(place: int) -> list[GenerateEvent]:
    stream = messages()
    del stream[images(stream)[place]]
    return renumbered(stream)


def changed(**fields: int) -> list[GenerateEvent]:
    stream = messages()
    for name, value in fields.items():
        setattr(stream[images(stream)[1]].image, name, value)
    return stream


def twice_done() -> list[GenerateEvent]:
    stream = messages()
    return renumbered([*stream, GenerateEvent(done=stream[-1].done)])


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        pytest.param(messages()[1:], "event 0 is missing before event 1", id="a-lost-message"),
        pytest.param(without(0), "do not follow 0 of None", id="the-first-chunk-is-lost"),
        pytest.param(without(1), "at offset 100 do not follow 50", id="a-chunk-is-lost"),
        pytest.param(without(-1), "bytes arrived before its receipt", id="the-last-chunk-is-lost"),
        pytest.param(changed(offset=49), "at offset 49 do not follow 50", id="chunks-overlap"),
        pytest.param(changed(total_bytes=60), "do not follow 50", id="the-size-changes"),
        pytest.param(changed(image_index=1), "picture 1 was not expected", id="a-picture-that-nobody-asked-for"),
        pytest.param(changed(image_index=-1), "picture -1 was not expected", id="a-negative-index"),
        pytest.param(twice_done(), "picture 0 was not expected", id="a-picture-is-finished-twice"),
        pytest.param(messages()[:-1], "after 0 of 1 pictures", id="the-stream-ends-early"),
        pytest.param([], "after 0 of 1 pictures", id="nothing-arrives"),
    ],
)
def test_a_damaged_stream_is_noticed(stream, text):
    with pytest.raises(DataLoss, match=text):
        read(stream)
