"""Reads the KV events of a server: `python kv_reader.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558`."""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def follow(live: str, replay: str) -> Iterator[list[Any]]:
    """Yield all batches in order, as `[seconds, events, rank]`; what was missed is asked for first."""
    with zmq.Context() as context, context.socket(zmq.SUB) as listen, context.socket(zmq.DEALER) as ask:
        listen.setsockopt(zmq.SUBSCRIBE, b"")
        listen.connect(live)
        ask.connect(replay)
        last = -1
        while True:
            _topic, number, payload = listen.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > last + 1:
                ask.send_multipart((b"", (last + 1).to_bytes(8, "big")))
                while (answer := ask.recv_multipart())[2] != END:
                    last = int.from_bytes(answer[2], "big")
                    yield msgspec.msgpack.decode(answer[3])
            if sequence > last:
                last = sequence
                yield msgspec.msgpack.decode(payload)


if __name__ == "__main__":
    for _seconds, events, _rank in follow(*sys.argv[1:]):
        for event in events:
            print(event["type"], len(event.get("block_hashes", ())), event.get("checkpoints", ""), flush=True)
