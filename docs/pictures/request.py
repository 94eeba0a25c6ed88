#!/usr/bin/env python3
"""Draws the path of a request as SVG: docs/pictures/request.py > docs/pictures/request.svg"""
from html import escape

# Boxes: name, x, y, width, height, lines of text. Coordinates in pixels, y grows downwards.
BOXES = [
    ("driver", 60, 70, 200, 60, ["virtio-blk driver", "of the guest"]),
    ("rings", 60, 200, 200, 80, ["shared memory", "descriptors, available ring,", "used ring"]),
    ("queue", 480, 70, 210, 60, ["queue", "reads and checks the chain"]),
    ("device", 480, 165, 210, 60, ["virtio-blk device", "makes a valid request"]),
    ("block", 480, 260, 210, 60, ["block node", "file, qcow2, nbd, …"]),
    ("loop", 480, 355, 210, 60, ["event loop", "submits and waits in one call"]),
    ("ring", 840, 355, 170, 60, ["io_uring", "of the kernel"]),
    ("disk", 840, 260, 170, 60, ["file or", "block device"]),
]
# Frames around boxes: title, x, y, width, height.
FRAMES = [
    ("Guest in a VMM (QEMU, …)", 10, 30, 290, 300),
    ("I/O thread of ringmill", 460, 30, 250, 405),
    ("Kernel", 820, 220, 210, 215),
]
# Arrows: points, label, position of the label, anchor of the label, dashed.
ARROWS = [
    ([(160, 130), (160, 200)], "1 writes", (168, 169), "start", False),
    ([(260, 90), (480, 90)], "2 kick (eventfd)", (380, 82), "middle", False),
    ([(260, 220), (325, 220), (325, 112), (480, 112)], "3 reads the chain", (332, 170), "start", False),
    ([(585, 130), (585, 165)], "", (0, 0), "start", False),
    ([(585, 225), (585, 260)], "", (0, 0), "start", False),
    ([(585, 320), (585, 355)], "", (0, 0), "start", False),
    ([(690, 375), (840, 375)], "4 submission", (765, 367), "middle", False),
    ([(925, 355), (925, 320)], "", (0, 0), "start", False),
    ([(840, 397), (690, 397)], "5 completion", (765, 413), "middle", True),
    ([(480, 372), (325, 372), (325, 260), (260, 260)], "6 fills the used ring", (332, 345), "start", True),
    ([(480, 398), (35, 398), (35, 100), (60, 100)], "7 interrupt (eventfd), once per batch", (300, 416), "middle", True),
]


def main():
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 450" font-family="sans-serif" font-size="13">']
    out.append('<title>The path of a request through ringmill</title>')
    out.append('<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
               'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>')
    out.append('<rect width="1040" height="450" fill="white"/>')
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
