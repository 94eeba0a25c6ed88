"""An NBD client with TLS that breaks the rules, each time on a connection of its own; the server has to end it.
usage: nbd_tls_hostile.py SOCKET CREDENTIALS [deaf]"""

import socket
import ssl
import sys

PATH, CREDENTIALS = sys.argv[1:3]
OPTION = b"IHAVEOPT"


def take(sock, count):
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, "the server has closed the connection"
        data += more
    return data


def start():
    """A socket on which TLS begins."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(PATH)
    take(sock, 18)
    sock.sendall(b"\0\0\0\3" + OPTION + b"\0\0\0\5\0\0\0\0")
    assert take(sock, 20)[12:16] == b"\0\0\0\1"
    return sock


def context():
    made = ssl.create_default_context(cafile=CREDENTIALS + "/ca-cert.pem")
    made.load_cert_chain(CREDENTIALS + "/client-cert.pem", CREDENTIALS + "/client-key.pem")
    return made


def go():
    """A socket in the transmission phase, and the same without TLS."""
    sock = start()
    raw = sock.dup()
    raw.settimeout(60)
    secure = context().wrap_socket(sock, server_hostname="localhost", suppress_ragged_eofs=False)
    secure.sendall(OPTION + b"\0\0\0\1\0\0\0\4disk")
    take(secure, 10)
    return secure, raw


def request(kind, cookie, offset, length):
    head = b"\x25\x60\x95\x13\0\0" + kind.to_bytes(2, "big") + cookie.to_bytes(8, "big")
    return head + offset.to_bytes(8, "big") + length.to_bytes(4, "big")


def send(sock, data):
    try:
        sock.sendall(data)
    except OSError:
        pass


def ended(sock):
    """Waits for the end; gives what came before it."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def hello():
    """What a client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def record(kind, data):
    return bytes([kind, 3, 3]) + len(data).to_bytes(2, "big") + data


def deaf():
    secure, _ = go()
    try:
        while True:
            secure.sendall(b"".join(request(0, n, 0, 1 << 20) for n in range(100)))
    except OSError:
        sys.exit()


if sys.argv[3:] == ["deaf"]:
    deaf()

# No TLS at all, in a handshake's place; each ends with an alert, or with nothing.
for junk in [
    b"GET / HTTP/1.0\r\n\r\n",
    OPTION + b"\0\0\0\3\0\0\0\0",
    b"\0" * 100,
    b"\xff" * 100,
    record(23, b"data before there are keys"),
    record(22, b"\1\xff\xff\xff" + b"\0" * 16000),
    record(22, b"\2\0\0\4\0\0\0\0"),
    record(21, b"\2\0"),
    record(20, b"\1") * 1000,
    record(22, b"") * 1000,
    b"\x16\3\1\xff\xff" + b"\0" * 70000,
]:
    sock = start()
    send(sock, junk)
    ended(sock)
# A message without an end, in the smallest records.
sock = start()
send(sock, record(22, b"\1\0\xff\0") + record(22, b"\0") * 40000)
ended(sock)
# One that is cut off, anywhere.
whole = hello()
for length in [*range(1, 12), len(whole) - 1, len(whole)]:
    sock = start()
    send(sock, whole[:length])
    sock.close()

# What nobody has encrypted, among what was.
for junk in [record(23, b"\0" * 64), b"\x17\3\3\xff\xff", b"GET / HTTP/1.0\r\n\r\n", record(22, b"\0" * 64)]:
    secure, raw = go()
    secure.sendall(request(0, 7, 0, 512))
    assert take(secure, 16)[8:] == (7).to_bytes(8, "big")
    take(secure, 512)
    send(raw, junk)
    assert ended(raw)[:1] in (b"\x15", b"\x17"), "an alert says why"
# Within a record, and between two parts of a message.
secure, raw = go()
send(raw, b"\x17\3\3")
raw.shutdown(socket.SHUT_WR)
ended(raw)
secure, raw = go()
secure.sendall(request(1, 1, 0, 4096) + b"half of it")
raw.shutdown(socket.SHUT_WR)
ended(raw)
# Who sends no more still gets his replies.
secure, raw = go()
secure.sendall(request(0, 8, 4096, 65536) + request(0, 9, 4096, 65536))
raw.shutdown(socket.SHUT_WR)
replies = b""
try:
    while more := secure.recv(65536):
        replies += more
except ssl.SSLError:
    pass
assert len(replies) == 2 * (16 + 65536), len(replies)
# And so does who says that in the protocol's way.
secure, raw = go()
secure.sendall(request(0, 8, 4096, 512))
take(secure, 16 + 512)
secure.unwrap()
print("done")
