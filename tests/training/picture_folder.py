"""A folder of pictures with points, as users have it."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

HEADER = "file,left_eye_outer_x,left_eye_outer_y,right_eye_outer_x,right_eye_outer_y"
#: Brightness of the two dots in each picture.
LEFT, RIGHT = 250, 120


def drawn_folder(folder: Path, rows: int = 4, header: str = HEADER) -> Path:
    """Write four pictures of 64 x 32 with a bright left and a darker right dot; rows repeat."""
    places = [((8 + 4 * number, 8), (40 + 4 * number, 20)) for number in range(4)]
    for number, (left, right) in enumerate(places):
        picture = Image.new("L", (64, 32))
        for place, grey in ((left, LEFT), (right, RIGHT)):
            picture.paste(grey, (place[0] - 2, place[1] - 1, place[0] + 3, place[1] + 2))
        picture.save(folder / f"{number}.png")
    lines = [
        ",".join(map(str, (f"{row % 4}.png", *places[row % 4][0], *places[row % 4][1])))
        for row in range(rows)
    ]
    (folder / "points.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder
