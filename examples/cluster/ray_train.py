"""examples/cluster/elastic.py as a Ray Train job: Ray starts its workers, and again after a failure.

pip install "ray[train]"
python examples/cluster/ray_train.py --workers 8 --folder /shared/checkpoints --steps 1000

Ray sets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR and joins the process group, in which Lightning finds itself as
under torchrun: neither Ray's strategies nor its `prepare_trainer` are needed, and the strategies of this package work.
Checkpoints are those of the script, in a folder that all nodes see; Ray's own are not used.

Written for Ray Train V2 by its documentation; it was not run, since Ray was not available where it was written.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--cpu", action="store_true", help="without GPUs, over gloo")
parser.add_argument("--failures", type=int, default=99, help="how often Ray starts the workers again")


def train(arguments):
    """Run the script in a worker."""
    import elastic

    elastic.main(arguments)


def main(arguments=None):
    import ray.train
    from ray.train.torch import TorchTrainer

    options, rest = parser.parse_known_args(arguments)  # the rest is for the script
    TorchTrainer(
        train,
        train_loop_config=rest,
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=options.failures)),
    ).fit()


if __name__ == "__main__":
    main()
