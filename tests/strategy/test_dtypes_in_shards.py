"""Float64 beside float32, and float32 norms and embeddings under bf16-mixed, on two processes against one."""

from tests.strategy.test_sharded_averages import folder, found  # noqa: F401  # the same launch


def test_float64_layers_beside_float32_train_as_in_one_process(found):  # noqa: F811
    for rank in found:
        assert rank["mixed float32"] < 1e-6
        assert rank["mixed float64"] < 1e-8  # their inputs are float32
        assert all(rank["mixed dtypes kept"])
        assert rank["mixed sharded"] == ["scale"]  # without a dimension, so replicated
        assert rank["mixed resumed"] == 0


def test_embeddings_and_norms_stay_in_float32_as_in_one_process(found):  # noqa: F811
    for rank in found:
        gap, dtypes = rank["residual float32"]
        assert dtypes == ["torch.float32", "torch.float32"]
        assert gap < 1e-6 < rank["residual moved"]
        rounded, dtypes = rank["residual bfloat16"]
        assert dtypes == ["torch.bfloat16", "torch.bfloat16"]
        assert rounded > 10 * gap
