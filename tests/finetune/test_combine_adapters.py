import peft
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import (
    adapter_names,
    add_adapter_,
    combine_adapters_,
    load_adapter_,
    quantize_base_,
    remove_adapter_,
    save_adapter,
    use_adapter_,
)

TASKS = {"one": 3, "two": 2, "three": 2}  # name → rank
WEIGHTS = {"one": 0.7, "two": -0.4, "three": 1.5}


def net():
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16), "beside": nn.Linear(16, 16)})


def run(model, x):
    return model["beside"](model["down"](torch.tanh(model["up"](x))))


def config(rank, **more):
    return peft.LoraConfig(r=rank, lora_alpha=5, init_lora_weights=False, **more)


def with_tasks(model):
    for number, (name, rank) in enumerate(TASKS.items()):
        torch.manual_seed(number)
        add_adapter_(model, config(rank), ["up", "down"] if name != "three" else ["up"], name=name)
    return model


def changes(model, name):
    """Return the ΔW of a layer, from the difference of its outputs for unit vectors."""
    found = {}
    for place in ("up", "down"):
        layer = model[place]
        if name in layer.lora_A:
            found[place] = layer.lora_B[name].weight @ layer.lora_A[name].weight * layer.scaling[name]
    return found


@pytest.mark.parametrize("prepare", [lambda model: model, lambda model: quantize_base_(model) and model])
def test_combined_weight_change_is_the_weighted_sum(prepare):
    model = net()
    prepare(model)
    with_tasks(model)
    assert combine_adapters_(model, WEIGHTS) == 7
    single = {name: changes(model, name) for name in TASKS}
    found = changes(model, "combined")
    for place in ("up", "down"):
        expected = sum(WEIGHTS[name] * single[name][place] for name in TASKS if place in single[name])
        torch.testing.assert_close(found[place], expected)
    assert [name for name, p in model.named_parameters() if p.requires_grad and ".combined." not in name] == []


def test_linear_model_outputs_the_weighted_sum():
    model, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(5, 16)
    plain = model(x)
    for name, rank in TASKS.items():
        add_adapter_(model, config(rank), "0", name=name)
    gains = {}
    for name in TASKS:
        use_adapter_(model, name)
        gains[name] = model(x) - plain
    combine_adapters_(model, WEIGHTS, name="all")
    expected = plain + sum(weight * gains[name] for name, weight in WEIGHTS.items())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("how", "theirs"), [("sum", "svd"), ("ties", "ties_svd")])
def test_truncation_to_a_rank_equals_pefts(how, theirs):
    """Compare with PEFT's own function, on its own model with the same layers."""
    weights, model = {"one": 0.7, "two": 0.4}, net()
    wrapped = peft.get_peft_model(net(), config(TASKS["one"], target_modules=["up", "down"]), adapter_name="one")
    wrapped.add_adapter("two", config(TASKS["two"], target_modules=["up", "down"]))
    for name in weights:
        add_adapter_(model, config(TASKS[name]), ["up", "down"], name=name)
    values = {key.removeprefix("base_model.model."): value for key, value in wrapped.state_dict().items()}
    model.load_state_dict(values)
    wrapped.add_weighted_adapter(
        list(weights), list(weights.values()), "combined", combination_type=theirs, svd_rank=2, density=0.3
    )
    assert combine_adapters_(model, weights, how=how, density=0.3, rank=2) == 2
    for place, change in changes(model, "combined").items():
        expected = wrapped.base_model.model[place].get_delta_weight("combined")
        torch.testing.assert_close(change, expected, atol=1e-5, rtol=1e-4)


def test_combined_adapter_saves_and_loads(tmp_path):
    model, fresh, x = with_tasks(net()), net(), torch.randn(3, 16)
    combine_adapters_(model, WEIGHTS)
    save_adapter(model, tmp_path / "combined", name="combined")
    load_adapter_(fresh, tmp_path / "combined")
    torch.testing.assert_close(run(fresh, x), run(model, x))


def test_removing_one_adapter_leaves_the_others_unchanged():
    model, x = with_tasks(net()), torch.randn(3, 16)
    use_adapter_(model, "one")
    expected = run(model, x)
    remove_adapter_(model, "two")
    assert adapter_names(model) == ["one", "three"]
    assert torch.equal(run(model, x), expected)
    assert not any(".two" in name for name, _ in model.named_parameters())
    remove_adapter_(model, "one")
    use_adapter_(model, "three")
    three = changes(with_tasks(net()), "three")["up"]
    expected = net()
    expected["up"].weight.data += three.detach()
    torch.testing.assert_close(run(model, x), run(expected, x))
    with pytest.raises(ValueError, match="it is the only adapter"):
        remove_adapter_(model, "three")


def test_removing_the_active_adapter_activates_the_next():
    model = nn.Sequential(nn.Linear(4, 4))
    for name in ("a", "b"):
        add_adapter_(model, config(1), "0", name=name)
    use_adapter_(model, "b")
    remove_adapter_(model, "b")
    assert model[0].active_adapters == ["a"]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "0.lora_A.a.weight",
        "0.lora_B.a.weight",
    }


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (({"unknown": 1.0},), {}, "adapter 'unknown': the model has no adapter of this name"),
        (({},), {}, "no adapters to combine"),
        (({"one": 1.0},), {"name": "two"}, "an adapter of this name exists"),
        (({"one": 1.0},), {"how": "magic"}, "how='magic'"),
        (({"one": 1.0},), {"how": "ties", "density": 0}, "the fraction of values to keep"),
        (({"one": 1.0},), {"rank": 0}, "rank=0"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(arguments, settings, says):
    model = with_tasks(net())
    with pytest.raises(ValueError, match=says):
        combine_adapters_(model, *arguments, **settings)
    assert adapter_names(model) == list(TASKS)


@pytest.mark.parametrize(("settings", "says"), [({"use_dora": True}, "use_dora=True"), ({"bias": "all"}, "bias='all'")])
def test_adapters_other_than_plain_lora_are_refused(settings, says):
    model = net()
    add_adapter_(model, config(2, **settings), "up")
    with pytest.raises(ValueError, match=says):
        combine_adapters_(model, {"default": 1.0})


def test_other_kinds_and_merged_adapters_are_refused():
    model = net()
    ft.apply(model, [ft.finetune.IA3("up")])
    with pytest.raises(ValueError, match="it has IA3"):
        combine_adapters_(model, {"default": 1.0})
    model = with_tasks(net())
    ft.finetune.merge_adapters_(model)
    with pytest.raises(ValueError, match="already merged into the weights"):
        combine_adapters_(model, WEIGHTS)
