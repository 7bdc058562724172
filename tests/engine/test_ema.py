"""The running average."""

import pytest
import torch

from codmd.engine.ema import Ema


class Linear(torch.nn.Linear):
    def learned(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.named_parameters())


def test_it_is_the_weighted_mean_of_the_weights_since_its_start() -> None:
    network = Linear(3, 2).double()
    ema = Ema(network, decay=0.8, start=2)
    history = []
    for update in range(1, 7):
        with torch.no_grad():
            network.weight.add_(torch.randn_like(network.weight))
        history.append(network.weight.detach().clone())
        ema.update(update)
        if update <= 2:
            torch.testing.assert_close(ema.average["weight"].double(), history[-1], rtol=1e-6, atol=1e-6)
    expected = history[1]
    for weight in history[2:]:
        expected = 0.8 * expected + 0.2 * weight
    torch.testing.assert_close(ema.average["weight"].double(), expected, rtol=1e-6, atol=1e-6)


def test_applied_trades_the_weights_and_gives_them_back() -> None:
    network = Linear(3, 2)
    ema = Ema(network, decay=0.5)
    with torch.no_grad():
        network.weight.mul_(3)
    ema.update(1)
    raw, average = network.weight.detach().clone(), ema.average["weight"].clone()
    with pytest.raises(KeyError), ema.applied():
        torch.testing.assert_close(network.weight, average, rtol=0, atol=0)
        raise KeyError
    torch.testing.assert_close(network.weight, raw, rtol=0, atol=0)
    torch.testing.assert_close(ema.average["weight"], average, rtol=0, atol=0)


def test_a_power_schedule_weighs_every_update_by_a_power_of_its_number() -> None:
    """EDM2: the average over n updates has weights proportional to n^gamma, and the first one starts it."""
    gamma, network = 3.0, Linear(3, 2).double()
    ema = Ema(network, power=gamma, start=1)
    history = []
    for update in range(1, 102):
        with torch.no_grad():
            network.weight.copy_(torch.randn_like(network.weight))
        history.append(network.weight.detach().clone())
        ema.update(update)
    number = torch.arange(1, 101, dtype=torch.float64)
    # (1 - 1/n)^(gamma+1) telescopes: update i keeps (i/100)^(gamma+1) - ((i-1)/100)^(gamma+1).
    shares = (number / 100) ** (gamma + 1) - ((number - 1) / 100) ** (gamma + 1)
    expected = (shares.view(-1, 1, 1) * torch.stack(history[1:])).sum(0)
    torch.testing.assert_close(ema.average["weight"], expected)
    assert ema.average["weight"].dtype == torch.float64
