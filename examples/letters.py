"""Images without a download: letters and digits in matplotlib's fonts."""

import string
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

SIGNS = string.ascii_letters + string.digits


def read_letters(side, sizes):
    """Letters in all fonts and ``sizes``: images (N, 3, side, side) from -1 to 1, labels (N,), and numbers of fonts."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = [path for path in sorted(folder.glob("DejaVu*.ttf")) if "Display" not in path.name]
    pictures, labels, fonts = [], [], []
    for number, path in enumerate(paths):
        for size in sizes:
            font = ImageFont.truetype(str(path), size)
            for label, letter in enumerate(SIGNS):
                picture = Image.new("L", (side, side))
                ImageDraw.Draw(picture).text((side / 2, side / 2), letter, fill=255, font=font, anchor="mm")
                pictures.append(np.asarray(picture))
                labels.append(label)
                fonts.append(number)
    images = torch.from_numpy(np.stack(pictures)).float() / 127.5 - 1
    return images[:, None].expand(-1, 3, -1, -1), torch.tensor(labels), torch.tensor(fonts)
