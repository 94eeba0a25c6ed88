"""Says to a QMP server what standard input has, a JSON list of [command, arguments], by the library qemu.qmp;
prints the answers and then the names of the events that came, as JSON. usage: qmp_dialogue.py SOCKET"""

import asyncio
import json
import sys

from qemu.qmp import ExecuteError, QMPClient


async def main() -> None:
    client = QMPClient("test")
    await client.connect(sys.argv[1])
    answers = []
    for command, arguments in json.load(sys.stdin):
        try:
            answers.append({"return": await client.execute(command, arguments)})
        except ExecuteError as error:
            answers.append({"error": {"class": error.error_class, "desc": str(error)}})
    events = [event["event"] for event in client.events.history]
    await client.disconnect()
    print(json.dumps({"answers": answers, "events": events}))


asyncio.run(main())
