"""Records the order of vhost-user messages: stands between a front end and a back end.

usage: vhost_user_recorder.py LISTEN BACK_END OUTPUT

Listens on the socket LISTEN, connects to BACK_END for each front end that comes, and writes a line to OUTPUT for each
message. A line of standard input is written to OUTPUT, too, as `== LINE`, and answered by an empty line: whoever drives
the front end marks what it does. Ends with its standard input.

    connect                         a front end has connected
    closed by front end             or `back end`
    > NAME ARGUMENT...              a message; its last word is `ack` if it asks for an acknowledgement
    < NAME ARGUMENT...              the reply

Addresses of the front end's process are left out: a region of memory is named by its guest address and size, and a ring
by the region that it is in.
"""

import array
import os
import select
import socket
import struct
import sys

GET_FEATURES, SET_FEATURES, SET_MEM_TABLE, SET_LOG_BASE = 1, 2, 5, 6
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE = 15, 16, 18
GET_CONFIG, SET_CONFIG, GET_INFLIGHT_FD, SET_INFLIGHT_FD = 24, 25, 31, 32
ADD_MEM_REG, REM_MEM_REG = 37, 38

NAMES = {
    1: "GET_FEATURES", 2: "SET_FEATURES", 3: "SET_OWNER", 4: "RESET_OWNER", 5: "SET_MEM_TABLE", 6: "SET_LOG_BASE",
    7: "SET_LOG_FD", 8: "SET_VRING_NUM", 9: "SET_VRING_ADDR", 10: "SET_VRING_BASE", 11: "GET_VRING_BASE",
    12: "SET_VRING_KICK", 13: "SET_VRING_CALL", 14: "SET_VRING_ERR", 15: "GET_PROTOCOL_FEATURES",
    16: "SET_PROTOCOL_FEATURES", 17: "GET_QUEUE_NUM", 18: "SET_VRING_ENABLE", 21: "SET_BACKEND_REQ_FD",
    24: "GET_CONFIG", 25: "SET_CONFIG", 31: "GET_INFLIGHT_FD", 32: "SET_INFLIGHT_FD", 34: "RESET_DEVICE",
    36: "GET_MAX_MEM_SLOTS", 37: "ADD_MEM_REG", 38: "REM_MEM_REG", 39: "SET_STATUS", 40: "GET_STATUS",
}

HEADER = struct.Struct("=III")
NEED_REPLY = 8
MAX_FDS = 16
NO_FD = 0x100


class Closed(Exception):
    """The peer has closed its connection."""


def receive(peer):
    """Returns a message: request, flags, payload, descriptors."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = peer.recvmsg(HEADER.size, socket.CMSG_SPACE(MAX_FDS * size))
    fds = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[:len(value) - len(value) % size])
    if not data:
        raise Closed
    data += exactly(peer, HEADER.size - len(data))
    request, flags, length = HEADER.unpack(data)
    return request, flags, exactly(peer, length), list(fds)


def exactly(peer, length):
    data = b""
    while len(data) < length:
        more = peer.recv(length - len(data))
        if not more:
            raise Closed
        data += more
    return data


def forward(peer, message):
    request, flags, payload, fds = message
    data = HEADER.pack(request, flags, len(payload)) + payload
    sent = socket.send_fds(peer, [data], fds) if fds else peer.send(data)
    # A peer that has closed its end meanwhile refuses even nothing.
    if sent < len(data):
        peer.sendall(data[sent:])
    for fd in fds:
        os.close(fd)


class Text:
    """Messages as text."""

    def __init__(self):
        # By the address in the front end's process.
        self.regions = {}

    def region(self, payload, at):
        guest, size, user, _ = struct.unpack_from("=QQQQ", payload, at)
        name = f"{guest:#x}+{size:#x}"
        return user, size, name

    def find(self, address):
        for user, (size, name) in self.regions.items():
            if user <= address < user + size:
                return name
        return "?"

    def request(self, request, payload, fds):
        if request in (SET_FEATURES, SET_PROTOCOL_FEATURES):
            return [f"{struct.unpack('=Q', payload)[0]:#x}"]
        if request == SET_MEM_TABLE:
            count = struct.unpack_from("=I", payload)[0]
            regions = [self.region(payload, 8 + i * 32) for i in range(count)]
            self.regions = {user: (size, name) for user, size, name in regions}
            return [name for _, _, name in regions]
        if request in (ADD_MEM_REG, REM_MEM_REG):
            user, size, name = self.region(payload, 8)
            if request == ADD_MEM_REG:
                self.regions[user] = (size, name)
            else:
                self.regions.pop(user, None)
            return [name]
        if request == SET_VRING_ADDR:
            index, flags, desc = struct.unpack_from("=IIQ", payload)
            return [index, self.find(desc)] + (["log"] if flags & 1 else [])
        if request in (SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE):
            return struct.unpack("=II", payload)
        if request == GET_VRING_BASE:
            return struct.unpack("=II", payload)[:1]
        if request in (SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR):
            index = struct.unpack("=Q", payload)[0]
            return [index & 0xff] + (["nofd"] if index & NO_FD else [])
        if request in (GET_INFLIGHT_FD, SET_INFLIGHT_FD):
            _, _, queues, size = struct.unpack_from("=QQHH", payload)
            return [queues, size]
        if request == SET_LOG_BASE:
            return [f"{struct.unpack_from('=Q', payload)[0]:#x}"]
        if request == GET_CONFIG:
            return struct.unpack_from("=II", payload)
        if request == SET_CONFIG:
            offset, _, _ = struct.unpack_from("=III", payload)
            return [offset, payload[12:].hex()]
        if len(payload) == 8:
            return [f"{struct.unpack('=Q', payload)[0]:#x}"]
        return [payload.hex()] if payload else []

    def reply(self, request, payload):
        if request == GET_VRING_BASE:
            return struct.unpack("=II", payload)
        if request in (GET_INFLIGHT_FD, GET_CONFIG):
            return []
        if len(payload) == 8:
            number = struct.unpack("=Q", payload)[0]
            return [f"{number:#x}" if request in (GET_FEATURES, GET_PROTOCOL_FEATURES) else number]
        return [payload.hex()] if payload else []


def main():
    listen, back_end_path, output = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(listen)
    listener.listen()
    out = open(output, "w", encoding="ascii")

    def say(*words):
        print(*words, file=out, flush=True)

    print(flush=True)
    front = back = text = None
    while True:
        # What the front end has sent before a mark comes before it.
        sources = [sys.stdin, listener] if front is None else [front, back, sys.stdin]
        ready, _, _ = select.select(sources, [], [])
        source = next(source for source in sources if source in ready)
        if source is sys.stdin:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            say("==", line.decode().strip())
            print(flush=True)
            continue
        if source is listener:
            front, _ = listener.accept()
            back = socket.socket(socket.AF_UNIX)
            try:
                back.connect(back_end_path)
            except OSError:
                # It comes again.
                front.close()
                back.close()
                front = back = None
                continue
            text = Text()
            say("connect")
            continue
        try:
            request, flags, payload, fds = message = receive(source)
            name = NAMES.get(request, request)
            if source is front:
                ack = ["ack"] if flags & NEED_REPLY else []
                say(">", name, *text.request(request, payload, fds), *ack)
                forward(back, message)
            else:
                say("<", name, *text.reply(request, payload))
                forward(front, message)
        except (Closed, ConnectionError):
            say("closed by", "front end" if source is front else "back end")
            front.close()
            back.close()
            front = back = None


main()
