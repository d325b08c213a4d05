"""The values of a batch that are kept on the host are right, are dropped when it is changed, and answer for masks."""

import functools

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, masking_utils

from lightning_fasttrain.core.batch.host_copies import Transfers, host_values
from lightning_fasttrain.core.batch.leaves import split_batch
from lightning_fasttrain.core.batch.padded_axes import PaddedAxis, Padding
from lightning_fasttrain.core.host import host_answers
from lightning_fasttrain.core.host.host_answers import decide_masks_on_host
from lightning_fasttrain.loaders import prefetch_to_device
from lightning_fasttrain.micro_batching.normalizer.count_targets import CountRule
from lightning_fasttrain.micro_batching.padding.try_trimming import trim_batch

META = torch.device("meta")  # a device whose values cannot be read, so that nothing here can come from it


def moved(batch):
    with Transfers(META):
        return move_data_to_device(batch, META)


VIEWS = {
    "all": lambda x: x,
    "rows": lambda x: x[2:4],
    "one row": lambda x: x[1],
    "columns": lambda x: x[:, 1:],
    "a view of a view": lambda x: x[2:].t()[1:],
    "every second": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:1].expand(4, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_view_of_a_batch_has_the_values_of_that_view(view, dtype):
    values = torch.randint(2, (4, 6)).to(dtype)
    assert torch.equal(host_values(view(moved(values))), view(values))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_transposed_batches_keep_their_values(order):
    values = torch.arange(6).view(2, 3).permute(order)
    assert torch.equal(host_values(moved(values)[1:]), values[1:])


CHANGES = {
    "in place": lambda x: x.add_(1),
    "in place through a view": lambda x: x[0].zero_(),
    "filled in part": lambda x: x.__setitem__((0, 0), 5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_values_are_dropped_when_the_batch_is_changed(change):
    batch = moved(torch.arange(6).view(2, 3))
    rows = batch[1:]
    assert host_values(rows) is not None
    change(batch)
    assert host_values(batch) is host_values(rows) is None


def test_what_is_computed_from_a_batch_is_unknown():
    batch = moved(torch.arange(6).view(2, 3))
    assert host_values(batch + 1) is host_values(batch.clone()) is host_values(batch.int()) is None


def test_a_loader_may_write_to_its_memory_again():
    memory = torch.arange(4)
    batch = moved(memory)
    memory.numpy()[:] = -1
    assert host_values(batch).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("leaf", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), torch.tensor(3)])
def test_images_and_numbers_are_not_kept(leaf):
    assert host_values(moved(leaf)) is None


def test_prefetched_micro_batches_are_counted_and_cut_on_the_host():
    ids = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 0, 0, 0], [7, 8, 9, 9]])
    batch = {"input_ids": ids, "labels": torch.where(ids == 0, -100, ids)}
    (on_device,) = prefetch_to_device([batch], META)
    assert list(map(CountRule("targets"), split_batch(on_device, 2))) == [5, 5]
    assert list(map(CountRule("next_tokens"), split_batch(on_device, 2))) == [3, 3]
    members = (("batch['input_ids']", (1,)), ("batch['labels']", (1,)))
    extents = Padding((PaddedAxis(members, "batch['input_ids']", 0),)).read(on_device)
    assert extents.rows == [[[0, 2]], [[0, 3]], [[0, 1]], [[0, 4]]]
    short, long = trim_batch(on_device, extents, [[2, 0], [3, 1]], multiple_of=1).parts
    assert host_values(short["input_ids"]).tolist() == [[6, 0], [1, 2]]
    assert [CountRule("targets")(part) for part in (short, long)] == [3, 7]


@pytest.fixture
def asked(monkeypatch):
    """The masks and positions that transformers reads, on the device that they are read from."""
    found = []

    def note(own, values, *args, **kwargs):
        found.append(values)
        if values is not None and values.is_meta:
            return None  # there are no values to read, and those of a model's own positions begin once
        return own(values, *args, **kwargs)

    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices"):
        monkeypatch.setattr(masking_utils, name, functools.partial(note, getattr(masking_utils, name)))
    return found


SIZES = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SMALL = LlamaConfig(**SIZES, use_cache=False, attn_implementation="sdpa")
PADDED = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("make", [lambda: LlamaForCausalLM(SMALL), lambda: BertModel(BertConfig(**SIZES))])
@pytest.mark.parametrize("mask", [torch.ones_like(PADDED), PADDED, PADDED.bool()])
def test_a_mask_on_a_device_is_read_on_the_host(asked, make, mask):
    model = make().to(META)
    undo = decide_masks_on_host(model)
    model(input_ids=moved(torch.ones_like(PADDED)), attention_mask=moved(mask))
    undo()
    assert len(asked) == 1
    assert torch.equal(asked[0], mask.bool())


def test_packed_documents_are_found_on_the_host_as_by_transformers():
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    config = LlamaConfig(**SIZES, attn_implementation="eager")
    inputs = torch.zeros(2, 4, 8)

    def mask_of(positions, inputs):
        return masking_utils.create_causal_mask(config, inputs, None, None, position_ids=positions)

    expected = mask_of(positions, inputs)
    undo = decide_masks_on_host()
    assert torch.equal(masking_utils.find_packed_sequence_indices(positions), (positions == 0).cumsum(1) - 1)
    assert mask_of(moved(positions), inputs.to(META)).shape == expected.shape  # not the causal one, without documents
    assert masking_utils.find_packed_sequence_indices(moved(torch.arange(4)[None])) is None
    undo()


def count_reads(model, asked, batches):
    """How often each forward reads values that are not known on the host."""
    counts = []
    model.to(META)
    undo = decide_masks_on_host(model)
    for ids in batches:
        before = len(asked)
        model(input_ids=moved(ids))
        counts.append(sum(values is not None for values in asked[before:]))
    undo()
    return counts


def test_positions_that_a_model_makes_from_the_shape_are_read_once_a_shape(asked):
    rows, row = torch.ones(2, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
    # The second forward shows where they come from.
    assert count_reads(LlamaForCausalLM(SMALL), asked, [rows, rows, rows, rows, row, row]) == [1, 1, 0, 0, 1, 0]


def test_positions_that_are_given_are_read_beside_those_that_a_model_makes(asked):
    model, ids = LlamaForCausalLM(SMALL).to(META), moved(torch.ones(2, 4, dtype=torch.long))
    packed = torch.tensor([[0, 1, 0, 1]])
    undo = decide_masks_on_host(model)
    for _ in range(3):
        model(input_ids=ids)
    model(input_ids=ids, position_ids=moved(packed))
    model(input_ids=ids, position_ids=packed.to(META))
    undo()
    known, unknown = (values for values in asked[4:] if values is not None)
    assert torch.equal(known, packed.expand(2, 4))
    assert unknown.is_meta


class FromIds(LlamaForCausalLM):
    """Makes its positions from the inputs, as models with learned positions and padding do."""

    def forward(self, input_ids, position_ids=None):
        return self.model(inputs_embeds=self.model.embed_tokens(input_ids), position_ids=input_ids.cumsum(1) - 1)


def test_positions_that_depend_on_the_inputs_are_always_read(asked):
    assert count_reads(FromIds(SMALL), asked, [torch.ones(1, 3, dtype=torch.long)] * 4) == [1, 1, 1, 1]


def test_everything_is_restored_by_the_last_run_that_ends():
    before, model = dict(vars(masking_utils)), LlamaForCausalLM(SMALL)
    first, second = decide_masks_on_host(model), decide_masks_on_host(model)
    first()
    assert vars(masking_utils) != before
    second()
    assert vars(masking_utils) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert host_answers._running.get() == ()
