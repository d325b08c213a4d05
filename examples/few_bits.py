"""Optimizers whose state has few bits, beside the plain ones: loss and bytes of state, of a small GPT on real text.

    python examples/few_bits.py [--steps 200] [--out RESULTS.json]

As in examples/bf16_alone.py, with AdamW at 1e-3 and Lion at 1e-4. Rows whose package is not installed are left out.
"""

from importlib.util import find_spec

from bf16_alone import main

RUNS = {
    "adamw": {"lr": 1e-3},
    "adamw8bit": {"lr": 1e-3},
    "adamw4bit": {"lr": 1e-3},
    "lion": {"lr": 1e-4},
    "lion8bit": {"lr": 1e-4},
    "muon": {"lr": 1e-3},
}


if __name__ == "__main__":
    left_out = {"adamw4bit"} if find_spec("torchao") is None else set()
    main({name: {"name": name, **settings} for name, settings in RUNS.items() if name not in left_out}, "few_bits")
