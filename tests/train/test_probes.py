"""Who reaches whom: asked over TCP, answered by number, whatever else listens at the address."""

import socket

from nmoe_train.elastic.probes import AnsweringPort, reached_by, reaches


def test_a_worker_answers_with_its_number_and_nobody_else_is_taken_for_it() -> None:
    port = AnsweringPort("127.0.0.1")
    port.number = 7
    assert reaches(1, 7, port.address)
    assert not reaches(1, 8, port.address), "another worker has taken the port"


def test_whoever_is_gone_or_silent_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        port = AnsweringPort("127.0.0.1")
        port.number = 2
        roster = {1: "127.0.0.1:1", 2: port.address, 3: address}
        assert reached_by(3, roster) == [2, 3]
    assert reached_by(5, roster) == [2, 5]


def test_odd_words_do_not_end_the_answering() -> None:
    port = AnsweringPort("127.0.0.1")
    port.number = 3
    host, _, number = port.address.rpartition(":")
    for words in (b"GET / HTTP/1.1\r\n", b"", b"\xff" * 64):
        with socket.create_connection((host, int(number))) as connection:
            connection.sendall(words)
    assert reaches(1, 3, port.address)
