"""Muon: its update against torch's and against the published algorithm, and what it leaves to Adam."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from transformer.compute import autocast
from transformer.config.settings import ModelConfig, Norm, OptimizerKind, Positions, Precision, Score, TrainConfig
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.training import muon
from transformer.training.muon import Muon, orthogonal
from transformer.training.optimizer import build_optimizer, load_moments, moments_by_name, set_rate

Array = NDArray[np.float64]
CPU = torch.device("cpu")
SMALL = ModelConfig(n_layers=2, d_model=16, d_ff=24, n_heads=2, max_positions=16, positions=Positions.learned)
RATES = (1e-2, 3e-2, 2e-2)


def build(*, weight_decay: float = 0.0, double: bool = False, config: ModelConfig = SMALL) -> tuple[Transformer, Muon]:
    torch.manual_seed(0)
    model = Transformer(config, 13)
    model = model.double() if double else model
    recipe = TrainConfig(optimizer=OptimizerKind.muon, weight_decay=weight_decay)
    recipe = replace(recipe, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)  # not the defaults
    optimizer = build_optimizer(model, recipe)
    assert isinstance(optimizer, Muon)
    return model, optimizer


def draw_gradients(model: nn.Module, *, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def in_the_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """What Muon is for, by name: the weights of the maps in the layers of encoder and decoder."""
    suffixes = ("W_q.weight", "W_k.weight", "W_v.weight", "W_o.weight", "W_1.weight", "W_2.weight")
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(suffixes)}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ---- the update -----------------------------------------------------------------------------------------------------


def test_muon_moves_the_matrices_of_the_layers() -> None:
    model, optimizer = build()
    maps = in_the_layers(model)
    assert len(maps) == 2 * (4 + 2) + 2 * (8 + 2)  # each encoder layer has one attention, each decoder layer two
    assert {id(matrix) for matrix in optimizer.matrices} == {id(matrix) for matrix in maps.values()}
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, everything)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("kind", OptimizerKind)
def test_vectors_of_additive_scores_are_no_matrix(kind: OptimizerKind) -> None:
    """One for each head, stacked: neither Muon's, nor decayed."""
    model = Transformer(replace(SMALL, score=Score.additive), 13)
    optimizer = build_optimizer(model, TrainConfig(optimizer=kind, weight_decay=0.3))
    vectors = {id(parameter) for name, parameter in model.named_parameters() if name.endswith("score_vector")}
    assert len(vectors) == 2 + 2 * 2
    assert vectors <= {id(parameter) for parameter in optimizer.param_groups[-1]["params"]}
    assert [group["weight_decay"] for group in optimizer.param_groups][-2:] == [0.3, 0.0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_step_is_torchs_muon_for_matrices_and_its_adamw_for_the_rest(weight_decay: float) -> None:
    model, ours = build(weight_decay=weight_decay)
    theirs = copy.deepcopy(model)
    maps = in_the_layers(theirs)
    torch_muon = torch.optim.Muon(
        maps.values(), weight_decay=weight_decay, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    rest = [parameter for name, parameter in theirs.named_parameters() if name not in maps]
    groups = [
        {"params": [parameter for parameter in rest if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in rest if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False)

    start = snapshot(model)
    for seed, rate in enumerate(RATES):
        draw_gradients(model, seed=seed)
        draw_gradients(theirs, seed=seed)
        for optimizer in (torch_muon, adam, ours):
            set_rate(optimizer, rate)
        torch_muon.step()
        adam.step()
        with autocast(CPU, Precision.bf16):  # torch's multiplies in bf16, whatever is asked for
            ours.step()

    for name, expected in theirs.named_parameters():
        actual = model.get_parameter(name).detach()
        if name not in maps:
            torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)
        else:  # the order of products in bf16 differs
            error = (actual - expected.detach()).norm() / (expected.detach() - start[name]).norm()
            assert error < 0.05, name


def published(
    gradients: list[Tensor], start: Tensor, rates: tuple[float, ...], *, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """Jordan et al. (2024) with the scale of Liu et al. (2025, section 2.2); the matrix and its momentum."""
    w, m = start.clone(), torch.zeros_like(start)
    rows, columns = start.shape
    for g, rate in zip(gradients, rates, strict=True):
        m = 0.95 * m + 0.05 * g
        u, s, v = torch.linalg.svd(0.95 * m + 0.05 * g, full_matrices=False)
        s = s / (s**2).sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = w - rate * weight_decay * w - rate * 0.2 * math.sqrt(max(rows, columns)) * (u * s) @ v
    return w, m


def test_step_is_muon_as_published() -> None:
    """In fp64, with the polynomial applied to the singular values themselves."""
    model, optimizer = build(weight_decay=0.3, double=True)
    start, drawn = snapshot(model), []
    for seed, rate in enumerate(RATES):
        draw_gradients(model, seed=seed)
        drawn.append(
            {name: matrix.grad.clone() for name, matrix in in_the_layers(model).items() if matrix.grad is not None}
        )
        set_rate(optimizer, rate)
        optimizer.step()
    for name, matrix in in_the_layers(model).items():
        gradients = [of_step[name] for of_step in drawn]
        weight, mean = published(gradients, start[name], RATES, weight_decay=0.3)
        torch.testing.assert_close(matrix.detach(), weight, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(optimizer.state[matrix]["exp_avg"], mean, rtol=1e-12, atol=1e-14)


def newton_schulz(x: Array) -> Array:
    """Five iterations, as Jordan et al. (2024) write them."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * x @ x.T @ x @ x.T) @ x
    return x


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, positions=Positions.sinusoidal, norm=Norm.pre, tie_embeddings=False),
        replace(SMALL, score=Score.additive),
    ],
    ids=["tied, learned positions", "untied, pre-norm", "additive scores"],
)
def test_three_steps_of_a_training_are_those_of_numpy(config: ModelConfig) -> None:
    """The whole optimizer on the gradients of a loss, in fp64: momentum as Jordan's sum and not as a mean, and Adam
    with its weight decay by Loshchilov and Hutter (2019, algorithm 2)."""
    model, optimizer = build(weight_decay=0.3, double=True, config=config)
    maps = in_the_layers(model)
    weights: dict[str, Array] = {name: tensor.numpy() for name, tensor in snapshot(model).items()}
    sums = {name: np.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: np.zeros_like(weight) for name, weight in weights.items()}

    for step, rate in enumerate(RATES, start=1):
        set_rate(optimizer, rate)
        model.zero_grad()
        loss_of(model, seed=step).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient: Array = parameter.grad.numpy()
            if name in maps:
                sums[name] = 0.95 * sums[name] + gradient
                update = newton_schulz(gradient + 0.95 * sums[name]) * 0.2 * max(gradient.shape) ** 0.5
            else:
                sums[name] = 0.8 * sums[name] + gradient
                squares[name] = 0.95 * squares[name] + 0.05 * gradient**2
                mean = 0.2 * sums[name] / (1 - 0.8**step)
                update = mean / (np.sqrt(squares[name] / (1 - 0.95**step)) + 1e-6)
            is_decayed = gradient.ndim == 2 and not name.endswith("score_vector")
            weights[name] = (1 - rate * 0.3 * is_decayed) * weights[name] - rate * update
        optimizer.step()

    for name, parameter in model.named_parameters():
        share = 0.05 if name in maps else 0.2
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(optimizer.state[parameter]["exp_avg"], share * sums[name], rtol=1e-9, atol=1e-15)


def loss_of(model: Transformer, *, seed: int) -> Tensor:
    """Of two random sentence pairs without padding."""
    torch.manual_seed(seed)
    source, target = torch.randint(4, 13, (2, 2, 6))
    layout = Padded.of([6, 6], 6)
    logits = model(source, target, source_layout=layout, target_layout=layout)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_keeps_the_directions_and_makes_their_sizes_alike(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    sizes = u.mT @ orthogonal(1e-3 * x) @ v.mT  # diagonal, if the directions are those of x
    diagonal = sizes.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(sizes, torch.diag_embed(diagonal), rtol=0, atol=1e-9)
    assert float(diagonal.min()) > 0.6
    assert float(diagonal.max()) < 1.3


def test_orthogonal_multiplies_in_the_type_of_autocast() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 8, 24)
    exact = orthogonal(x)
    with autocast(CPU, Precision.bf16):
        rounded = orthogonal(x)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(rounded, exact)
    assert float((rounded - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("at_once", [1, 3 * 16 * 16])
def test_step_of_few_matrices_at_once_is_that_of_all(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for limit in (at_once, muon.AT_ONCE):
        monkeypatch.setattr(muon, "AT_ONCE", limit)
        model, optimizer = build(double=True)
        draw_gradients(model, seed=0)
        set_rate(optimizer, 0.1)
        optimizer.step()
        weights.append(snapshot(model))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-12, atol=1e-14)


def test_a_copy_of_the_optimizer_steps() -> None:
    _, optimizer = build()
    other = copy.deepcopy(optimizer)
    for matrix in other.matrices:
        matrix.grad = torch.ones_like(matrix)
    other.step()
    assert all(len(other.state[matrix]) == 1 for matrix in other.matrices)


def test_orthogonal_of_nothing_is_nothing() -> None:
    """The gradient of a layer that was not used."""
    assert torch.equal(orthogonal(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def test_step_leaves_a_matrix_without_a_gradient_alone() -> None:
    model, optimizer = build(weight_decay=0.3)
    set_rate(optimizer, 0.1)
    draw_gradients(model, seed=0)
    name = "encoder.0.self_attention.W_v.weight"
    model.get_parameter(name).grad = None
    before = snapshot(model)
    optimizer.step()
    moved = {other for other, tensor in snapshot(model).items() if not torch.equal(tensor, before[other])}
    assert moved == before.keys() - {name}


def test_step_changes_nothing_where_it_is_skipped() -> None:
    """Weights, moments and their number, whatever the gradient holds; and the first update may be such a one."""
    model, optimizer = build(weight_decay=0.3)
    set_rate(optimizer, 0.1)
    for seed in range(2):
        for poison in (math.nan, math.inf, 1.0):  # finite, where another gradient is not
            before = snapshot(model)
            moments = {name: tensor.clone() for name, tensor in moments_by_name(model, optimizer).items()}
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, poison)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())
            after = moments_by_name(model, optimizer)
            assert all(torch.equal(after[name], moments.get(name, torch.zeros_like(after[name]))) for name in after)

        draw_gradients(model, seed=seed)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        assert float(moments_by_name(model, optimizer)["updates"]) == seed + 1


# ---- its moments in a checkpoint ------------------------------------------------------------------------------------


def test_moments_by_name_have_no_squares_of_matrices() -> None:
    model, optimizer = build()
    set_rate(optimizer, 0.1)
    draw_gradients(model, seed=0)
    optimizer.step()
    names = {name for name, _ in model.named_parameters()}
    squares = names - in_the_layers(model).keys()
    expected = {f"exp_avg/{name}" for name in names} | {f"exp_avg_sq/{name}" for name in squares} | {"updates"}
    assert moments_by_name(model, optimizer).keys() == expected


@pytest.mark.parametrize("theirs", OptimizerKind)
def test_load_moments_refuses_those_of_the_other_optimizer(theirs: OptimizerKind) -> None:
    model, _ = build()
    kinds = {kind: build_optimizer(model, TrainConfig(optimizer=kind)) for kind in OptimizerKind}
    draw_gradients(model, seed=0)
    for optimizer in kinds.values():
        optimizer.step()
    moments = moments_by_name(model, kinds.pop(theirs))
    with pytest.raises(ValueError, match="names of the moments differ"):
        load_moments(model, kinds.popitem()[1], moments)
