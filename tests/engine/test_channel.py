"""JSON lines over a socket pair."""

from __future__ import annotations

import json
import math
import socket
import threading

import pytest

from elastic.engine.channel import Channel


@pytest.fixture
def ends():
    sockets = socket.socketpair()
    for sock in sockets:
        sock.settimeout(20)
    yield sockets
    for sock in sockets:
        sock.close()


@pytest.fixture
def channels(ends):
    return Channel(ends[0]), Channel(ends[1])


def test_messages_arrive_in_order_and_end_with_the_channel(channels):
    one, other = channels
    sent = [{"op": "form", "n": n, "text": 'line\n"quoted" é \0'} for n in range(50)]
    for message in sent:
        one.send(message)
    one.close()
    assert list(other) == sent


def test_both_directions_at_once(channels):
    one, other = channels
    one.send({"to": "other"})
    other.send({"to": "one"})
    assert next(iter(one)) == {"to": "one"}
    assert next(iter(other)) == {"to": "other"}


def test_an_iterator_goes_on_where_it_was(channels):
    one, other = channels
    messages = iter(other)
    one.send({"n": 1})
    assert next(messages) == {"n": 1}
    one.send({"n": 2})
    one.send({"n": 3})
    one.close()
    assert [message["n"] for message in messages] == [2, 3]


def test_what_is_not_finite_survives(channels):
    one, other = channels
    one.send({"loss": math.nan, "norm": math.inf})
    got = next(iter(other))
    assert math.isnan(got["loss"])
    assert got["norm"] == math.inf


@pytest.mark.parametrize("torn", [b'{"n":2', b'{"n":2}', b"{", b"\xff"])
def test_a_torn_last_line_is_dropped(ends, torn):
    ends[0].sendall(json.dumps({"n": 1}).encode() + b"\n" + torn)
    ends[0].close()
    assert list(Channel(ends[1])) == [{"n": 1}]


def test_a_line_that_comes_in_pieces(ends):
    messages = iter(Channel(ends[1]))
    data = json.dumps({"n": 1, "pad": "x" * 3000}).encode() + b"\n"

    def drip():
        for at in range(0, len(data), 700):
            ends[0].sendall(data[at : at + 700])

    thread = threading.Thread(target=drip)
    thread.start()
    assert next(messages)["n"] == 1
    thread.join()


def test_nothing_sent_is_nothing_read(channels):
    one, other = channels
    one.close()
    assert list(other) == []


def test_sending_to_a_closed_end_is_an_oserror(channels):
    one, other = channels
    other.close()
    with pytest.raises(BrokenPipeError):
        one.send({"pad": "x" * 1000})


def test_closing_ends_a_read_under_way_in_another_thread(channels):
    one, _other = channels
    got = []
    thread = threading.Thread(target=lambda: got.append(list(one)))
    thread.start()
    one.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert got == [[]]


def test_closing_twice_is_no_error(channels):
    one, other = channels
    other.close()
    one.close()
    one.close()


def test_lines_of_many_threads_do_not_mix(channels):
    one, other = channels
    got = []
    reader = threading.Thread(target=lambda: got.extend(other))
    reader.start()

    def write(who):
        for n in range(50):
            one.send({"who": who, "n": n, "pad": str(who) * 5000})

    writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    one.close()
    reader.join(timeout=20)
    for who in range(4):
        assert [message["n"] for message in got if message["who"] == who] == list(range(50))
    assert len(got) == 200
