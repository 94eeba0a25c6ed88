#!/usr/bin/env python3
"""Draws the text on standard input as a terminal, in SVG: terminal.py TITLE < top.txt > top.svg"""
import sys
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 7.83, 19, 14, 50
lines = sys.stdin.read().rstrip("\n").split("\n")
width = round(max(map(len, lines)) * WIDTH + 2 * LEFT)
height = TOP + HEIGHT * len(lines) + 4
out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="monospace" font-size="13">',
    f"<title>{escape(sys.argv[1])}</title>",
    f'<rect width="{width}" height="{height}" rx="8" fill="#1e2430"/>',
    *(f'<circle cx="{20 + 18 * i}" cy="18" r="5" fill="{c}"/>' for i, c in enumerate(["#e0655a", "#e0b84c", "#62b562"])),
]
for number, line in enumerate(lines):
    heading = line.split(" ")[0].isupper()
    colour = "#8fc7ff" if heading else "#dde3ea"
    # With textLength, columns stay aligned whatever the font is.
    if line:
        out.append(
            f'<text x="{LEFT}" y="{TOP + HEIGHT * number}" fill="{colour}" xml:space="preserve" '
            f'textLength="{len(line) * WIDTH:.1f}">{escape(line)}</text>'
        )
print("\n".join([*out, "</svg>"]))
