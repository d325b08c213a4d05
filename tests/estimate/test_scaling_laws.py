"""Scaling laws give the tables of their papers, and their optima are minima."""

import dataclasses

import pytest

from lightning_fasttrain.estimate import (
    CHINCHILLA,
    REPLICATION,
    expected_loss,
    kaplan_allocation,
    kaplan_loss,
    kaplan_loss_of_compute,
    optimal_allocation,
    optimal_tokens,
    outside_of_range,
    parameters_for_loss,
    pf_days,
    six_n_flops,
)

# Hoffmann et al., table A3, approach 3: parameters, FLOPs, tokens. The FLOPs of 175e9 have a wrong exponent there.
TABLE_A3 = [
    (400e6, 2.21e19, 9.2e9),
    (1e9, 1.62e20, 27.1e9),
    (10e9, 2.46e22, 410.1e9),
    (67e9, 1.71e24, 4.1e12),
    (175e9, 1.26e25, 12.0e12),
    (280e9, 3.52e25, 20.1e12),
    (520e9, 1.36e26, 43.5e12),
    (1e12, 5.65e26, 94.1e12),
]
# Table 3, approach 1.
TABLE_3 = [(400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12)]
LAWS = pytest.mark.parametrize("law", [CHINCHILLA, REPLICATION], ids=lambda law: law.name)


@pytest.mark.parametrize(("parameters", "flops", "tokens"), TABLE_A3)
def test_approach_3_gives_its_table(parameters, flops, tokens):
    """Not to all digits, as a and b of the table are fitted, too: 0.46 and 0.54 of a budget."""
    assert optimal_allocation(flops, CHINCHILLA)[0] == pytest.approx(parameters, rel=0.07)
    assert optimal_tokens(parameters, CHINCHILLA) == pytest.approx(tokens, rel=0.2)


def test_the_rounded_constants_of_the_text_do_not_give_the_table():
    rounded = dataclasses.replace(CHINCHILLA, alpha=0.34, beta=0.28)
    assert optimal_tokens(400e6, rounded) > 1.5 * 9.2e9


@pytest.mark.parametrize(("parameters", "flops", "tokens"), TABLE_3)
def test_the_replication_agrees_with_approach_1(parameters, flops, tokens):
    assert optimal_allocation(flops)[0] == pytest.approx(parameters, rel=0.15)
    assert optimal_tokens(parameters) == pytest.approx(tokens, rel=0.25)


def test_exponents_are_those_of_the_papers():
    """Table 2 of Hoffmann et al., approach 3, N ~ C^0.46; Besiroglu et al., N ~ C^0.5126."""
    for law, exponent in ((CHINCHILLA, 0.4565), (REPLICATION, 0.5126)):
        grown = optimal_allocation(1e23, law)[0] / optimal_allocation(1e22, law)[0]
        assert grown == pytest.approx(10**exponent, rel=1e-3)


@LAWS
def test_the_optimum_has_the_lowest_loss_of_its_budget(law):
    flops = 1e21
    parameters, tokens = optimal_allocation(flops, law)
    assert six_n_flops(parameters, tokens) == pytest.approx(flops)
    assert optimal_tokens(parameters, law) == pytest.approx(tokens)
    best = expected_loss(parameters, tokens, law)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert expected_loss(parameters * factor, tokens / factor, law) > best


@LAWS
def test_the_budget_of_a_loss_reaches_it(law):
    parameters, tokens = parameters_for_loss(2.5, law)
    assert expected_loss(parameters, tokens, law) == pytest.approx(2.5)
    assert optimal_allocation(six_n_flops(parameters, tokens), law)[0] == pytest.approx(parameters)


def test_no_budget_reaches_the_loss_of_text_itself():
    with pytest.raises(ValueError, match=r"loss=1\.8 with the law of Chinchilla, replicated.*1\.8172 with any number"):
        parameters_for_loss(1.8)


def test_gopher_is_worse_than_chinchilla_with_the_same_budget():
    assert expected_loss(70e9, 1.4e12) < expected_loss(280e9, 300e9) - 0.02


def test_a_training_at_kaplans_critical_batch_takes_twice_the_least_compute():
    """Section 6.1: table 6 has tokens at the critical batch size, for a budget far below it."""
    for days in (1e-2, 1.0, 1e2):
        taken = pf_days(six_n_flops(*kaplan_allocation(days)))
        assert taken / days == pytest.approx(2, rel=0.15)


def test_kaplans_law_has_its_limits():
    """Equations 1.1 and 1.2, of fits of their own, far from the other limit; figure 1."""
    assert kaplan_loss(1e9, 1e16) == pytest.approx((8.8e13 / 1e9) ** 0.076, rel=0.03)
    assert kaplan_loss(1e15, 1e9) == pytest.approx((5.4e13 / 1e9) ** 0.095, rel=0.03)
    assert kaplan_loss_of_compute(3.1e8) == 1


def test_the_range_of_a_fit_is_stated():
    assert outside_of_range(44e6, 500e9) == ""
    assert outside_of_range(1e6, 1e12) == (
        "extrapolated: 1e6 parameters, where the law was fitted for 44e6 to 16.2e9; "
        "1e12 tokens, where the law was fitted for 5e9 to 500e9"
    )
