#!/usr/bin/env python3
"""Draws the path of a request as SVG: docs/pictures/request.py > docs/pictures/request.svg"""
from html import escape

# Boxes: name, x, y, width, height, lines of text. Coordinates in pixels, y grows downwards.
BOXES = [
    ("driver", 40, 70, 200, 60, ["virtio-blk driver", "of the guest"]),
    ("rings", 40, 200, 200, 80, ["shared memory:", "descriptors, available ring,", "used ring"]),
    ("queue", 360, 70, 190, 60, ["queue", "reads and checks the chain"]),
    ("device", 360, 165, 190, 60, ["virtio_blk", "makes a valid request"]),
    ("block", 360, 260, 190, 60, ["block node", "file, qcow2, nbd, …"]),
    ("loop", 360, 355, 190, 60, ["event loop", "submits and waits in one call"]),
    ("ring", 670, 355, 190, 60, ["io_uring", "of the kernel"]),
    ("disk", 670, 260, 190, 60, ["file or", "block device"]),
]
# Frames around boxes: title, x, y, width, height.
FRAMES = [
    ("Guest and VMM (QEMU, Cloud Hypervisor)", 20, 30, 240, 300),
    ("I/O thread of ringmill", 340, 30, 230, 405),
    ("Kernel", 650, 220, 230, 215),
]
# Arrows: points, label, position of the label, anchor of the label, dashed.
ARROWS = [
    ([(140, 130), (140, 200)], "1 writes", (146, 168), "start", False),
    ([(240, 90), (360, 90)], "2 kick (eventfd)", (300, 82), "middle", False),
    ([(240, 215), (300, 215), (300, 110), (360, 110)], "3 pop", (306, 170), "start", False),
    ([(455, 130), (455, 165)], "", (0, 0), "start", False),
    ([(455, 225), (455, 260)], "", (0, 0), "start", False),
    ([(455, 320), (455, 355)], "", (0, 0), "start", False),
    ([(550, 375), (670, 375)], "4 submit", (610, 367), "middle", False),
    ([(765, 355), (765, 320)], "", (0, 0), "start", False),
    ([(670, 397), (550, 397)], "5 completion", (610, 413), "middle", True),
    ([(360, 385), (320, 385), (320, 262), (240, 262)], "6 used ring, per batch", (252, 300), "start", True),
    ([(320, 262), (320, 50), (140, 50), (140, 70)], "7 signal (eventfd)", (230, 44), "middle", True),
]


def main():
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 460" font-family="sans-serif" font-size="13">']
    out.append('<title>The path of a request through ringmill</title>')
    out.append('<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
               'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>')
    out.append('<rect width="900" height="460" fill="white"/>')
    for title, x, y, w, h in FRAMES:
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="#f4f6f8" stroke="#9aa5b1"/>')
        out.append(f'<text x="{x + w // 2}" y="{y - 8}" text-anchor="middle" font-weight="bold">{escape(title)}</text>')
    for _, x, y, w, h, lines in BOXES:
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="white" stroke="#333"/>')
        top = y + h / 2 - 8 * (len(lines) - 1) + 4
        for i, line in enumerate(lines):
            weight = ' font-weight="bold"' if i == 0 else ""
            out.append(f'<text x="{x + w / 2:g}" y="{top + 17 * i:g}" text-anchor="middle"{weight}>{escape(line)}</text>')
    for points, label, (x, y), anchor, dashed in ARROWS:
        path = " ".join(f"{px},{py}" for px, py in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="1.5"{dash} marker-end="url(#head)"/>')
        if label:
            out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#0b5394" stroke="#f4f6f8" stroke-width="3" '
                       f'paint-order="stroke">{escape(label)}</text>')
    out.append("</svg>")
    print("\n".join(out))


main()
