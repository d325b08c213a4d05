"""Run ``fasttrain`` as ``python -m lightning_fasttrain.cli``."""

from lightning_fasttrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
