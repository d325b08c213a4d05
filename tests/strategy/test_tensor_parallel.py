"""Tensor parallelism on two and on four real processes with gloo, against one process. Two launches serve all tests."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BloomConfig,
    BloomForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_fasttrain.architecture import mixture_of_depths_, stochastic_depth_
from lightning_fasttrain.bench.gpt import GPT, GPTConfig
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.heads import SplitHead
from lightning_fasttrain.loss import fuse_loss_head_, linear_cross_entropy
from lightning_fasttrain.loss.loss_inputs import logits_of
from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import full_checkpoint
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from lightning_fasttrain.strategy.tensor_parallel import styles
from lightning_fasttrain.strategy.tensor_parallel.context_parallel import divide_context_
from lightning_fasttrain.strategy.tensor_parallel.layouts import split_intervals
from lightning_fasttrain.strategy.tensor_parallel.parallelize import SplitRandomness, divide_heads_
from lightning_fasttrain.strategy.tensor_parallel.plan import plan_tensor_parallel
from lightning_fasttrain.strategy.tensor_parallel.sequence_parallel import plan_on_shares
from tests.strategy import context_scenarios, vocabulary_scenarios
from tests.strategy.muon_scenarios import STEPS as MUON_STEPS
from tests.strategy.tensor_scenarios import KINDS, MESHES, VOCABULARY, Net, batches_of, two_epochs
from tests.support.nets import as_loader, largest_difference, trainer, weights
from tests.support.ranks import run_on_two_gpus, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all checkpoints; the first is that of one process after two of four batches."""
    folder = tmp_path_factory.mktemp("tensor")
    t = trainer()
    t.fit(Net("short gpt"), as_loader(batches_of("gpt", 0, 4)[:2]))
    t.save_checkpoint(folder / "one.ckpt")
    return folder


def launch(folder, count, *scenarios):
    path = folder / f"found{count}.json"
    log = folder / f"log{count}"
    run_ranks("tests.strategy.tensor_scenarios", path, folder, *scenarios, log=log, count=count, timeout_s=240)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def two(folder):
    return launch(folder, 2)


@pytest.fixture(scope="module")
def four(folder):
    return launch(
        folder, 4, "equal", "resharded", "consistency", "options", "vocabulary", "vocabulary losses", "muon", "context"
    )


@pytest.fixture(params=["two", "four"])
def found(request):
    return request.getfixturevalue(request.param)


def each_kind(kinds):
    """Parametrize a test by launch and by the kinds of model that the launch trains."""
    pairs = [("two", kind) for kind in kinds[2]] + [("four", kind) for kind in kinds[4]]
    return pytest.mark.parametrize(("found", "kind"), pairs, indirect=["found"])


def largest(found, key):
    return max(rank[key] for rank in found)


@each_kind(KINDS)
def test_clipped_steps_equal_those_of_one_process(found, kind):
    assert largest(found, f"{kind} losses") < 1e-5
    assert largest(found, f"{kind} weights") < 1e-5 < 5e-3 < largest(found, f"{kind} moved")


def test_checkpoints_resume_on_a_mesh_of_another_shape(found):
    for data, tensor in MESHES[len(found)]:
        assert largest(found, f"resumed on {data}x{tensor}") < 1e-6


def test_a_checkpoint_is_that_of_one_process_in_plain_names(found, folder):
    expected, stepper = two_epochs(batches_of("gpt", 0, 4), count=2)
    saved = full_checkpoint(folder / f"1x{len(found)}")
    assert largest_difference(weights(expected), saved["state_dict"]) < 1e-6
    momentum = {str(n): state["momentum_buffer"] for n, state in saved["optimizer_states"][0]["state"].items()}
    plain = {str(n): state["momentum_buffer"] for n, state in stepper.state_dict()["state"].items()}
    assert largest_difference(plain, momentum) < 1e-6


@pytest.mark.parametrize("technique", ["CompileBlocks", "FusedLossHead", "others", "AdaptiveClipping", "LoRA"])
def test_techniques_train_as_in_one_process(two, technique):
    assert largest(two, f"with {technique}") < 5e-6


def test_options_do_not_change_training_in_a_tensor_group(two, four):
    assert largest(two, "option offload") < 1e-6
    assert largest(two, "option reshard_after_forward") < 1e-6
    assert largest(four, "option replicas") < 1e-6


@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_without_a_dimension_train_and_resume_as_in_one_process(two, tensor):
    assert largest(two, f"scalar {tensor}") < 1e-6 < 1e-3 < largest(two, f"scalar {tensor} moved")
    assert largest(two, f"scalar {tensor} clipped") < 1e-6


def test_adapters_in_a_tensor_group_train(two):
    assert largest(two, "LoRA moved") > 1e-3


@pytest.mark.parametrize("plan", ["plan with torch's styles", "plan with ours styles", "plan of an encoder"])
def test_plans_of_the_user_and_for_an_encoder_train_as_in_one_process(two, plan):
    assert largest(two, plan) < 1e-6


def test_the_fused_path_of_an_encoder_is_not_used_on_a_part_of_its_weights(two):
    assert largest(two, "encoder in eval mode") < 1e-5
    assert two[0]["encoder is split"] == [12, 16]


def test_dropout_is_the_same_in_a_tensor_group(found):
    assert largest(found, "dropout") == 0


def test_the_sampler_gives_a_tensor_group_the_same_samples(found):
    samples = [rank["samples"] for rank in found]
    for rank, seen in enumerate(samples):
        assert seen == samples[rank // 2 * 2]
    every = sorted(int(batch["inputs"].sum()) for batch in batches_of("gpt", 0, 4))
    assert sorted(n for seen in samples[::2] for n in seen) == every


def test_different_batches_in_a_tensor_group_are_refused_on_its_ranks(found):
    assert all(
        "the ranks of a tensor or context group have different batches" in rank["other batches"] for rank in found
    )


def test_fabric_trains_clips_saves_and_loads(two):
    assert largest(two, "fabric") < 1e-6
    assert largest(two, "fabric loaded") < 1e-6


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("QLoRA", "tensor_parallel=2 with the quantised 'net.model.layers.0.self_attn.q_proj.base_layer.weight'"),
        ("world", "replicas=1 x tensor_parallel=3 over"),
        ("odd", "sequence_parallel=True with hidden states of shape (4, 7, 16): the 2 ranks"),
        ("between", "a block's input is not the output of the block before it"),
        ("tied", "tensor parallelism of 'net.head': it shares a parameter with another layer"),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(two, name, why):
    assert all(why in rank[f"refused {name}"] for rank in two)


def test_a_plan_comes_from_the_configuration_of_a_hugging_face_model():
    plan = plan_tensor_parallel(Net("llama"), 2)
    layer = "net.model.layers.0."
    assert [plan[f"{layer}self_attn.{name}_proj"].known_as for name in "qkvo"] == [*["colwise"] * 3, "rowwise"]
    assert plan[f"{layer}mlp.down_proj"].known_as == "rowwise"
    assert len(plan) == 7


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_plan_by_names_and_widths_finds_attention_and_mlps(kind):
    plan = plan_tensor_parallel(Net(kind), 2)
    styles = [style.known_as for style in plan.values()]
    assert styles == [*["colwise"] * 3, "rowwise", "colwise", "rowwise"]


def test_a_fused_projection_is_split_in_each_of_its_parts():
    plan = plan_tensor_parallel(GPT(GPTConfig(width=8, heads=2, layers=2)), 2)
    assert plan["blocks.0.attention.qkv"].parts == 3
    ranges = split_intervals(torch.Size([12, 4]), _StridedShard(0, split_factor=3), 1, 2)
    assert ranges == [[(2, 4), (6, 8), (10, 12)], [(0, 4)]]
    assert split_intervals(torch.Size([12, 4]), Shard(1), 1, 2) == [[(0, 12)], [(2, 4)]]
    assert split_intervals(torch.Size([12]), Replicate(), 1, 2) == [[(0, 12)]]


def test_heads_and_widths_that_do_not_divide_are_refused_with_the_divisors():
    with pytest.raises(ValueError, match=r"num_key_value_heads=2.*Use one of tensor_parallel=\[1, 2\]"):
        plan_tensor_parallel(Net("llama"), 4)
    with pytest.raises(ValueError, match=r"heads=4.*tensor_parallel=\[1, 2, 4\]"):
        plan_tensor_parallel(Net("gpt"), 3)
    with pytest.raises(ValueError, match=r"'net.blocks.0.up'.*tensor_parallel=\[1, 2, 4, 8, 16, 32, 64\]"):
        plan_tensor_parallel(Net("gpt"), 3, {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"})


def test_plans_that_mean_nothing_are_refused():
    net = Net("gpt")
    with pytest.raises(ValueError, match="'blocks.9', which matches no module"):
        plan_tensor_parallel(net, 2, {"blocks.9": "colwise"})
    with pytest.raises(ValueError, match="'colwise' for 'net.head': no 'rowwise' layer comes after it"):
        plan_tensor_parallel(net, 2, {"net.head": "colwise"})
    with pytest.raises(ValueError, match="the style 'columns'.*known are colwise, rowwise"):
        plan_tensor_parallel(net, 2, {"net.head": "columns"})
    with pytest.raises(ValueError, match="a LayerNorm in a tensor-parallel plan"):
        plan_tensor_parallel(net, 2, {"net.norm": "colwise"})
    with pytest.raises(ValueError, match="finds nothing to split in Sequential"):
        plan_tensor_parallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)


def test_parameters_of_single_heads_are_refused_by_name():
    config = T5Config(d_model=8, d_ff=16, d_kv=4, num_layers=2, num_heads=2, vocab_size=9)
    with pytest.raises(ValueError, match="relative_attention_bias.*may belong to single heads"):
        plan_tensor_parallel(T5ForConditionalGeneration(config), 2)


def test_ranks_of_a_tensor_group_are_neighbours():
    sharding = Sharding(replicas=2, tensor_parallel=2)
    assert sharding.shape(8) == (2, 2, 2)
    assert [sharding.data_ranks(8, rank)["rank"] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_layers_that_share_an_input_share_its_copy_and_nothing_is_kept(group):
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2) @ weight
    first, second = (styles.copy_once(x, group, styles.copy_to_group) for _ in range(2))
    assert first is second
    first.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
    del x, first, second
    assert len(styles._copies) == 0


@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_outside_of_a_split_vocabulary_are_refused(group, wrong):
    embedding = nn.Embedding(4, 2)
    styles.SplitEmbedding(embedding, group).install()
    assert embedding(torch.tensor([0, 3])).shape == (2, 2)
    with pytest.raises(IndexError):
        embedding(torch.tensor([wrong]))


def test_heads_that_a_module_states_become_those_of_one_rank():
    attention = SimpleNamespace(num_heads=8, all_head_size=64, head_dim=8)
    divide_heads_(attention, 4)
    assert vars(attention) == {"num_heads": 2, "all_head_size": 16, "head_dim": 8}


@each_kind(vocabulary_scenarios.KINDS)
def test_a_split_vocabulary_and_divided_tokens_train_as_in_one_process(found, kind):
    case = vocabulary_scenarios.MODELS[kind]
    assert largest(found, f"{kind} losses") < 1e-5
    assert largest(found, f"{kind} weights") < 2e-5  # 1.4e-5 with ATEN_CPU_CAPABILITY=default, less with vectors
    assert largest(found, f"{kind} tokens") == (8 // 2 if case.norm else 0)
    if case.head is None:
        return
    assert largest(found, f"{kind} logits") == 0
    assert largest(found, f"{kind} validated") < 1e-5
    assert largest(found, f"{kind} rows") == (case.settings.get("vocabulary", VOCABULARY) + 1) // 2


def test_a_split_vocabulary_resumes_unsplit_and_needs_no_fused_loss(two):
    assert largest(two, "logits of a replicated head") > 0
    assert largest(two, "split resumed unsplit") < 1e-6
    assert largest(two, "loss of torch's logits") < 1e-6
    assert largest(two, "loss of gathered logits") < 1e-6


def test_a_split_head_with_class_weights_and_a_bias_trains_in_fabric(two):
    assert largest(two, "split in fabric") < 1e-6


@pytest.mark.parametrize("name", vocabulary_scenarios.LOSSES)
def test_the_loss_of_a_split_weight_is_that_of_the_complete_one(found, name):
    assert largest(found, f"{name} loss") < 1e-12


def test_a_weight_that_is_not_split_by_rows_for_the_same_tokens_is_refused():
    hidden, targets = torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="hidden of Tensor and weight of DTensor.*on all of whose ranks hidden"):
            linear_cross_entropy(hidden, rows, targets)
        with pytest.raises(ValueError, match="backend='compiled' with a vocabulary that is split"):
            linear_cross_entropy(DTensor.from_local(hidden, mesh), rows, targets, backend="compiled")
    finally:
        dist.destroy_process_group()


def test_heads_that_cannot_be_split_are_replicated_or_refused_by_name():
    net = Net("gpt")
    fuse_loss_head_(net, "net.head")
    assert [plan_tensor_parallel(net, 2)[name].known_as for name in ("net.tokens", "net.head")] == ["vocabulary"] * 2
    other = Net("gpt")
    fuse_loss_head_(other, "net.head", backend="torch")
    assert "net.head" not in plan_tensor_parallel(other, 2)
    net.net.tokens.max_norm = 1.0  # looking up changes rows
    assert "net.head" not in plan_tensor_parallel(net, 2)
    with pytest.raises(ValueError, match=r"'vocabulary' for 'net.tokens' \(Embedding\): expected a torch.nn.Linear"):
        plan_tensor_parallel(net, 2, {"net.tokens": "vocabulary"})


@pytest.mark.parametrize("technique", ["CompileBlocks", "others"])
def test_techniques_beside_shares_of_the_tokens_train_as_in_one_process(two, technique):
    assert largest(two, f"divided with {technique}") < 1e-6


@pytest.mark.parametrize("name", ["split", "divided", "context"])
def test_dropout_differs_on_what_is_divided_and_is_that_of_one_process(two, name):
    assert all(rank[f"{name} masks"] for rank in two)
    assert largest(two, f"{name} dropout") < 1e-6
    assert largest(two, f"{name} dropout recomputed") == 0


def test_random_numbers_of_a_rank_leave_the_shared_ones_as_they_are():
    randomness = [SplitRandomness(rank) for rank in range(2)]
    drawn = []
    for mine in randomness:
        torch.manual_seed(5)
        mine.enter(torch.device("cpu"))
        drawn.append([torch.rand(3 + mine.rank)[0].item()])
        mine.leave()
        drawn[-1].append(torch.rand(1).item())
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] == drawn[1][1]
    randomness[0].enter(torch.device("cpu"))
    torch.manual_seed(7)  # as after an error
    randomness[0].leave()
    assert torch.initial_seed() == 7


def test_blocks_that_may_need_all_tokens_are_refused_by_name():
    def divide(model, plan=None):
        return plan_on_shares(model, find_blocks(model), plan_tensor_parallel(model, 2, plan))

    assert divide(Net("gpt"))["net.blocks.0.up"].enter is not styles.ColumnParallel().enter
    with pytest.raises(
        ValueError, match="'net.encoder.layers.0.self_attn' .MultiheadAttention.*neither split nor a norm"
    ):
        divide(Net("encoder"))
    with pytest.raises(ValueError, match="the style ColwiseParallel of 'net.blocks.0.up': torch's own styles"):
        divide(Net("gpt"), {"net.blocks.*.up": ColwiseParallel(), "net.blocks.*.down": RowwiseParallel()})
    net = Net("gpt")
    net.net.blocks[0].cross_attention = nn.Identity()
    with pytest.raises(ValueError, match="'net.blocks.0.cross_attention' .Identity.: it attends to another sequence"):
        divide(net)
    net = Net("gpt")
    stochastic_depth_(net, 0.5)
    with pytest.raises(ValueError, match="'net.blocks.0' .Block., which is skipped at random: ranks draw"):
        divide(net)
    with pytest.raises(ValueError, match="Sequential: it has no repeated blocks"):
        plan_on_shares(nn.Sequential(), {"": nn.Sequential()}, {})
    with pytest.raises(ValueError, match="sequence_parallel=True with tensor_parallel=1"):
        Sharding(sequence_parallel=True)


def test_conv1d_of_gpt2_and_positions_of_deberta_train_as_in_one_process(two):
    assert largest(two, "gpt2 weights") < 1e-6
    assert largest(two, "deberta weights") < 1e-6
    assert two[0]["deberta positions"] == [8, 16]


def test_biases_of_single_heads_made_outside_of_attention_are_refused_by_name():
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=4, vocab_size=8))
    with pytest.raises(ValueError, match=r"ALiBi of 'transformer' \(BloomModel\): it is a bias for each head"):
        plan_tensor_parallel(bloom, 2)
    mlps = {"*.dense_h_to_4h": "colwise", "*.dense_4h_to_h": "rowwise"}
    assert len(plan_tensor_parallel(bloom, 2, mlps)) == 4
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    beit = BeitConfig(**sizes, image_size=32, patch_size=16, use_shared_relative_position_bias=True)
    with pytest.raises(ValueError, match="attention with 'beit.shared_position_bias.relative_position_bias_table'"):
        plan_tensor_parallel(BeitForImageClassification(beit), 2)


def test_distillation_from_a_head_whose_vocabulary_is_split_is_refused():
    head, hidden = nn.Linear(2, 4), torch.ones(3, 2)
    logits = head(hidden)
    assert logits_of(logits, head, (hidden, logits), None) is not None
    SplitHead(head).install_below()
    with pytest.raises(ValueError, match="Distillation beside FusedLossHead: the vocabulary of the head is split"):
        logits_of(logits, head, (hidden, logits), None)


def test_muon_orthogonalizes_each_matrix_of_a_tensor_group_on_one_rank(found):
    assert largest(found, "muon split") == largest(found, "muon fused") == 0
    counts = [rank["muon counts"] for rank in found]
    assert sum(count["matrices"] for count in counts) == MUON_STEPS * found[0]["muon matrices"]
    # Of each of two layouts, the parts are gathered and the updates are; data ranks exchange shards.
    exchanges = 4 * MUON_STEPS if len(found) == 4 else 0
    assert all((count["all_gather"], count["all_to_all_single"]) == (4 * MUON_STEPS, exchanges) for count in counts)


@each_kind(context_scenarios.KINDS)
def test_shares_of_sequences_train_with_clipping_as_in_one_process(found, kind):
    assert largest(found, f"context {kind} moved") > 5e-3
    assert largest(found, f"context {kind} losses") < 1e-5
    assert largest(found, f"context {kind} weights") < 1e-5


def test_context_groups_of_four_and_of_replicas_train_as_in_one_process(four):
    assert largest(four, "context of four") < 1e-6
    assert largest(four, "context replicas") < 1e-6


@pytest.mark.parametrize("technique", ["CompileBlocks", "FusedLossHead", "others", "QLoRA"])
def test_techniques_beside_shares_of_sequences_train_as_in_one_process(two, technique):
    moved = two[0]["context QLoRA moved"]
    assert moved > 1e-3
    # AdamW divides small gradients, of adapters in their first steps, by their own size, and rounding with them.
    assert largest(two, f"context with {technique}") < (0.02 * moved if technique == "QLoRA" else 1e-5)


@pytest.mark.parametrize("kind", ["context", "sequence"])
def test_padding_is_cut_to_lengths_that_ranks_can_share(two, kind):
    assert largest(two, f"{kind} with padding") < 1e-5
    assert two[0][f"{kind} saved"] == pytest.approx(1 - (8 + 6 + 4 + 4) / 32)


def test_shares_of_sequences_train_clip_save_and_load_in_fabric(two):
    assert largest(two, "context in fabric") < 1e-6


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("other sequence", "it attends to another sequence, which has as many tokens as a rank's share"),
        ("eager", "'net.model.layers.0' (LlamaDecoderLayer): it fails on a share of the tokens"),
        ("naive", "'net.blocks.0' (Block): its attention does not call torch.nn.functional.scaled_dot_product"),
        ("positions", "'net.blocks.0' (Rotary): its values for a share of the tokens differ by"),
        ("gated", "'net.blocks.0' (Gated): its values for a share of the tokens differ by"),
        ("odd", "hidden states of shape (4, 7, 16): the 2 ranks of a group have equal shares"),
        ("single tokens", "sequences of 2 tokens: attention may take a single token"),
        ("batches", "a tensor or context group have different batches"),
    ],
)
def test_what_needs_complete_sequences_is_refused_on_all_ranks(two, name, why):
    assert all(why in rank[f"context refused {name}"] for rank in two)


def test_layers_that_mix_tokens_and_heads_that_do_not_divide_are_refused_by_name():
    net = Net("gpt")
    net.net.blocks[1].mixing = nn.Conv1d(16, 16, 3)
    with pytest.raises(ValueError, match=r"context_parallel=2 with 'net.blocks.1.mixing' \(Conv1d\): it may mix"):
        divide_context_(net, SimpleNamespace(size=lambda: 2))
    skipping = Net("gpt")
    mixture_of_depths_(skipping, 0.5)
    with pytest.raises(ValueError, match=r"with RoutedForward on 'net.blocks.\d': it routes the tokens of complete"):
        divide_context_(skipping, SimpleNamespace(size=lambda: 2))
    routed = Net("gpt")
    routed.net.config = SimpleNamespace(output_router_logits=True)
    with pytest.raises(ValueError, match="with output_router_logits=True: its loss has a term over the routing"):
        divide_context_(routed, SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=r"it does not divide \w+=4. Use one of context_parallel=\[1, 2, 4\]"):
        divide_context_(Net("gpt"), SimpleNamespace(size=lambda: 3))
    with pytest.raises(ValueError, match="Sequential: it has no repeated blocks"):
        divide_context_(nn.Sequential(nn.Linear(2, 2)), SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=r"context_parallel=3 over 8 processes.*Use one of context_parallel=\[1, 2, 4"):
        Sharding(context_parallel=3).shape(8)
    with pytest.raises(ValueError, match="context_parallel=2 with tensor_parallel=2: both divide the heads"):
        Sharding(context_parallel=2, tensor_parallel=2)
    assert Sharding(context_parallel=4).data_ranks(8, 5) == {"num_replicas": 2, "rank": 1}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 5e-2)])
def test_shares_of_sequences_on_two_gpus_train_as_on_one(precision, tolerance, tmp_path):
    code = f"""
import os, time, torch
from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FSDP2Strategy
from tests.strategy.tensor_scenarios import Net, batches_of
from tests.support.nets import as_loader, trainer
ends = []
# Two ranks with the same batches train as one.
for ranks in (2, 1):
    for kind in ("gpt", "llama"):
        module = Net(kind)
        strategy = FSDP2Strategy(context_parallel=ranks)
        t = trainer(accelerator="gpu", devices=2, precision={precision!r}, strategy=strategy)
        t.fit(module, as_loader(batches_of(kind, 0, 6)))
        ends.append(torch.stack(module.losses).cpu())
for divided, complete in zip(ends[:2], ends[2:]):
    torch.testing.assert_close(divided, complete, atol={tolerance}, rtol=0)
time.sleep(1)
os._exit(0)
"""
    run_on_two_gpus(code, tmp_path)
