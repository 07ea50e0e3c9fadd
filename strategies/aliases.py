"""The published strategies, each a line or two of composition."""

from typing import Any

from fedstale.strategies.adasync import AdaSync
from fedstale.strategies.gap_aware import DirectionalGap, Gap
from fedstale.strategies.schedule import Schedule, k_batch_async, k_sync, over_selection
from fedstale.strategies.server_optimizer import SGD, Adagrad, Adam, Momentum, Rate, Yogi
from fedstale.strategies.stale import StaleStrategy
from fedstale.strategies.travel import Grain
from fedstale.strategies.weighting import AgeCurve, ByAge, polynomial

Options = Any
"""Any other argument of `StaleStrategy`."""


def _compose(options: dict[str, Options], **parts: Options) -> StaleStrategy:
    """Return a strategy of these parts, unless the options replace some."""
    return StaleStrategy(**_with(options, **parts))


def _with(options: dict[str, Options], **parts: Options) -> dict[str, Options]:
    return parts | options


def FedAvg(in_flight: int | None = None, **options: Options) -> StaleStrategy:  # noqa: N802
    """Send to some nodes or to all, wait for every reply, and average by examples.

    Reference:
        McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data.
        AISTATS 2017.
    """
    return _compose(options, schedule=Schedule(in_flight=in_flight))


def FedAvgOverSelected(  # noqa: N802
    merge_size: int, factor: float = 1.3, **options: Options
) -> StaleStrategy:
    """Send to more nodes than needed, average the first replies, and forget the others.

    Reference:
        Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019.
    """
    return _compose(options, schedule=over_selection(merge_size, factor))


def FedAvgM(  # noqa: N802
    in_flight: int | None = None, *, rate: Rate = 1.0, beta: float = 0.9, **options: Options
) -> StaleStrategy:
    """Run FedAvg with momentum on the server."""
    return _compose(
        options, schedule=Schedule(in_flight=in_flight), server_optimizer=Momentum(rate, beta=beta)
    )


def FedAdam(in_flight: int | None = None, rate: Rate = 0.1, **options: Options) -> StaleStrategy:  # noqa: N802
    """Run FedAvg with Adam on the server."""
    return _compose(options, schedule=Schedule(in_flight=in_flight), server_optimizer=Adam(rate))


def FedYogi(in_flight: int | None = None, rate: Rate = 0.01, **options: Options) -> StaleStrategy:  # noqa: N802
    """Run FedAvg with Yogi on the server."""
    return _compose(options, schedule=Schedule(in_flight=in_flight), server_optimizer=Yogi(rate))


def FedAdagrad(in_flight: int | None = None, rate: Rate = 0.1, **options: Options) -> StaleStrategy:  # noqa: N802
    """Run FedAvg with Adagrad on the server."""
    return _compose(options, schedule=Schedule(in_flight=in_flight), server_optimizer=Adagrad(rate))


def FedBuff(  # noqa: N802
    in_flight: int, merge_size: int | AdaSync = 10, *, rate: Rate = 1.0, **options: Options
) -> StaleStrategy:
    """Merge every few updates, weighted by 1/sqrt(1 + staleness) and divided by their number.

    Reference:
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.
    """
    return _compose(
        options,
        schedule=k_batch_async(in_flight, merge_size),
        weighting=ByAge(polynomial(0.5)),
        server_optimizer=SGD(rate),
        normalise="merge_size",
    )


def FedAsync(  # noqa: N802
    in_flight: int, *, mix: Rate = 0.6, curve: AgeCurve | None = None, **options: Options
) -> StaleStrategy:
    """Mix each reply into the model at once: theta <- (1 - a s(tau)) theta + a s(tau) theta_i.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """
    return _compose(
        options,
        schedule=k_batch_async(in_flight, 1),
        weighting=ByAge(curve or polynomial(0.5)),
        server_optimizer=SGD(mix),
        normalise="merge_size",
        update="model",
    )


def GapAware(  # noqa: N802
    in_flight: int, merge_size: int | AdaSync = 10, *, of: Grain = "parameter", **options: Options
) -> StaleStrategy:
    """Run FedBuff with updates divided by the gap instead of the root of their age.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
    """
    return FedBuff(in_flight, merge_size, **_with(options, weighting=Gap(of=of)))


def DirectionAware(  # noqa: N802
    in_flight: int, merge_size: int | AdaSync = 10, *, share: float = 0.1, **options: Options
) -> StaleStrategy:
    """Run FedBuff with updates divided by the directional gap; fedstale's own."""
    return FedBuff(in_flight, merge_size, **_with(options, weighting=DirectionalGap(share=share)))


def AdaptiveSync(in_flight: int, start: int = 1, **options: Options) -> StaleStrategy:  # noqa: N802
    """Wait for more and more of the devices as the loss falls; forget the others each time.

    Reference:
        Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
    """
    size = AdaSync(start=start, most=in_flight, form="worker")
    return _compose(options, schedule=k_sync(in_flight, size), normalise="merge_size")
