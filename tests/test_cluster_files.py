"""The files for clusters that are not here name what exists: scripts, arguments, and the schema's keys."""

import importlib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture
def elastic(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "cluster"))
    return importlib.import_module("elastic")


def test_the_job_for_kubernetes_runs_the_script_with_its_arguments(elastic):
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, elastic_policy = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert elastic_policy["minReplicas"] <= spec["replicas"] <= elastic_policy["maxReplicas"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    launcher, script = container["command"]
    assert launcher == "torchrun"
    assert (ROOT / script).is_file()
    options = elastic.parser.parse_args(container["args"])
    assert options.sharded
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert any(options.folder.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_job_for_ray_leaves_the_arguments_of_the_script_to_it(elastic):
    job = importlib.import_module("ray_train")
    options, rest = job.parser.parse_known_args(["--workers", "4", "--folder", "s3://bucket/run", "--steps", "7"])
    assert options.workers == 4
    assert vars(elastic.parser.parse_args(rest)).items() >= {"folder": "s3://bucket/run", "steps": 7}.items()
