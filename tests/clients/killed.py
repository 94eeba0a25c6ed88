"""Works on an NBD export from several connections, kills its server with SIGKILL in the middle, and says what the
disk must hold then; or looks whether it does.

    killed.py URI load PID SEED MODEL
    killed.py URI look MODEL
"""

import json
import os
import random
import signal
import sys
import threading

import nbd

BLOCK = 4096
CONNECTIONS = 4
ANYTHING = -1


class Connection:
    """One connection, and what it knows of those blocks of the disk that are its own."""

    def __init__(self, uri, number, model):
        self.nbd = nbd.NBD()
        self.nbd.connect_uri(uri)
        blocks = self.nbd.get_size() // BLOCK
        self.blocks = list(range(number, blocks, CONNECTIONS))
        # Of each block the bytes that a sector of it may be filled with.
        self.model = model

    def work(self, rng, ops):
        ours = rng.sample(self.blocks, 200)
        for _ in range(ops):
            block = rng.choice(ours)
            what = rng.random()
            if what < 0.75:
                fill = rng.randrange(1, 256)
                self.may_be(block, fill)
                self.nbd.pwrite(bytes([fill]) * BLOCK, block * BLOCK)
                # Whoever was answered has it, flushed or not.
                self.model[block] = [fill]
            elif what < 0.85:
                # Whole clusters, with what others have there: nobody knows what they hold, in the end.
                self.may_be(block, 0)
                self.nbd.zero(BLOCK, block * BLOCK)
                self.model[block] = [0]
            elif what < 0.95:
                self.may_be(block, ANYTHING)
                self.nbd.trim(BLOCK, block * BLOCK)
            else:
                self.nbd.flush()

    def may_be(self, block, fill):
        self.model.setdefault(block, [0]).append(fill)


def load(uri, pid, seed, path):
    with open(path) as file:
        model = {int(block): fills for block, fills in json.load(file).items()}
    rng = random.Random(seed)
    connections = [Connection(uri, number, model) for number in range(CONNECTIONS)]

    def work(connection, seed, ops):
        try:
            connection.work(random.Random(seed), ops)
        except nbd.Error:
            # The server is gone.
            return
        os.kill(pid, signal.SIGKILL)

    threads = [
        threading.Thread(target=work, args=(connection, rng.random(), rng.randrange(50, 1000)))
        for connection in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open(path, "w") as file:
        json.dump(model, file)


def look(uri, path):
    handle = nbd.NBD()
    handle.connect_uri(uri)
    with open(path) as file:
        model = {int(block): fills for block, fills in json.load(file).items()}
    for block, fills in model.items():
        data = handle.pread(BLOCK, block * BLOCK)
        for at in range(0, BLOCK, 512):
            sector = data[at : at + 512]
            fill = sector[0]
            if ANYTHING not in fills and (fill not in fills or sector != bytes([fill]) * 512):
                sys.exit(f"block {block}, byte {at}: {fill}, which is none of {fills}")
        # What it holds now, it keeps.
        if len({data[at] for at in range(0, BLOCK, 512)}) == 1:
            model[block] = [data[0]]
        else:
            model[block] = fills
    print(len(model))
    with open(path, "w") as file:
        json.dump(model, file)


match sys.argv[2:]:
    case ["load", pid, seed, path]:
        load(sys.argv[1], int(pid), int(seed), path)
    case ["look", path]:
        look(sys.argv[1], path)
