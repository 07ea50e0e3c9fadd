"""The published strategies, each a line or two of composition."""

from typing import Any

from fedstale.strategies.delay_adaptive import fadas
from fedstale.strategies.schedule import (
    AdaSync,
    Schedule,
    k_async,
    k_batch_async,
    k_sync,
    over_selection,
)
from fedstale.strategies.selection.base import LeastAvailable
from fedstale.strategies.server_optimizer import SGD, Adagrad, Adam, Momentum, Rate, Yogi
from fedstale.strategies.strategy import StaleStrategy
from fedstale.strategies.weighting.base import AgeCurve, ByAge, constant, polynomial
from fedstale.strategies.weighting.cached import CachedUpdates
from fedstale.strategies.weighting.euclidean import EuclideanStaleness
from fedstale.strategies.weighting.gap import DirectionalGap, Gap, Grain
from fedstale.strategies.weighting.relevance import RelevanceAware

Options = Any
"""Any other argument of `StaleStrategy`."""


def _compose(options: dict[str, Options], **parts: Options) -> StaleStrategy:
    """Return a strategy of these parts, unless the options replace some."""
    return StaleStrategy(**_with(options, **parts))


def _with(options: dict[str, Options], **parts: Options) -> dict[str, Options]:
    return parts | options


def FedAvg(concurrency: int | None = None, **options: Options) -> StaleStrategy:  # noqa: N802
    """Send to some nodes or to all, wait for every reply, and average by examples.

    Reference:
        McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data.
        AISTATS 2017.
    """
    return _compose(options, schedule=Schedule(concurrency=concurrency))


def FedAvgOverSelected(  # noqa: N802
    buffer_size: int, factor: float = 1.3, **options: Options
) -> StaleStrategy:
    """Send to more nodes than needed, average the first replies, and forget the others.

    Reference:
        Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019.
    """
    return _compose(options, schedule=over_selection(buffer_size, factor))


def FedProx(  # noqa: N802
    concurrency: int | None = None, *, mu: float = 0.01, **options: Options
) -> StaleStrategy:
    """Run FedAvg with clients that add mu/2 |w - w_received|^2 to their loss.

    A client reads mu from its config as `proximal-mu`, as with Flower's strategy of this name; one
    that does not is a client of FedAvg.

    Reference:
        Li et al. Federated Optimization in Heterogeneous Networks. MLSys 2020.
    """
    return FedAvg(concurrency, **_with(options, train_config={"proximal-mu": mu}))


def FedAvgM(  # noqa: N802
    concurrency: int | None = None, *, rate: Rate = 1.0, beta: float = 0.9, **options: Options
) -> StaleStrategy:
    """Run FedAvg with momentum on the server."""
    return _compose(
        options,
        schedule=Schedule(concurrency=concurrency),
        server_optimizer=Momentum(rate, beta=beta),
    )


def FedAdam(concurrency: int | None = None, rate: Rate = 0.1, **options: Options) -> StaleStrategy:  # noqa: N802
    """Run FedAvg with Adam on the server."""
    return _compose(
        options, schedule=Schedule(concurrency=concurrency), server_optimizer=Adam(rate)
    )


def FedYogi(concurrency: int | None = None, rate: Rate = 0.01, **options: Options) -> StaleStrategy:  # noqa: N802
    """Run FedAvg with Yogi on the server."""
    return _compose(
        options, schedule=Schedule(concurrency=concurrency), server_optimizer=Yogi(rate)
    )


def FedAdagrad(  # noqa: N802
    concurrency: int | None = None, rate: Rate = 0.1, **options: Options
) -> StaleStrategy:
    """Run FedAvg with Adagrad on the server."""
    return _compose(
        options, schedule=Schedule(concurrency=concurrency), server_optimizer=Adagrad(rate)
    )


def FedBuff(  # noqa: N802
    concurrency: int, buffer_size: int | AdaSync = 10, *, rate: Rate = 1.0, **options: Options
) -> StaleStrategy:
    """Merge every few updates, weighted by 1/sqrt(1 + staleness) and divided by their number.

    Reference:
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.
    """
    return _compose(
        options,
        schedule=k_batch_async(concurrency, buffer_size),
        weighting=ByAge(polynomial(0.5)),
        server_optimizer=SGD(rate),
        normalise="buffer_size",
    )


def FedAsync(  # noqa: N802
    concurrency: int, *, mix: Rate = 0.6, curve: AgeCurve | None = None, **options: Options
) -> StaleStrategy:
    """Mix each reply into the model at once: theta <- (1 - a s(tau)) theta + a s(tau) theta_i.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """
    return _compose(
        options,
        schedule=k_batch_async(concurrency, 1),
        weighting=ByAge(curve or polynomial(0.5)),
        server_optimizer=SGD(mix),
        normalise="buffer_size",
        update="model",
    )


def GapAware(  # noqa: N802
    concurrency: int,
    buffer_size: int | AdaSync = 10,
    *,
    of: Grain = "parameter",
    **options: Options,
) -> StaleStrategy:
    """Run FedBuff with updates divided by the gap instead of the root of their age.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
    """
    return FedBuff(concurrency, buffer_size, **_with(options, weighting=Gap(of=of)))


def DirectionAware(  # noqa: N802
    concurrency: int, buffer_size: int | AdaSync = 10, *, share: float = 0.1, **options: Options
) -> StaleStrategy:
    """Run FedBuff with updates divided by the directional gap; fedstale's own."""
    return FedBuff(
        concurrency, buffer_size, **_with(options, weighting=DirectionalGap(share=share))
    )


def REFL(  # noqa: N802
    concurrency: int, buffer_size: int = 10, *, beta: float = 0.35, **options: Options
) -> StaleStrategy:
    """Ask those who will rarely be there, go on without the last, and weigh these when they come.

    Reference:
        Abdelmoniem, Sahu, Canini, Fahmy. REFL: Resource-Efficient Federated Learning.
        EuroSys 2023.
    """
    return _compose(
        options,
        selector=LeastAvailable(),
        schedule=k_async(concurrency, buffer_size),
        weighting=RelevanceAware(beta),
        normalise="weights",
    )


def FADAS(  # noqa: N802
    concurrency: int,
    buffer_size: int | AdaSync = 10,
    *,
    rate: Rate = 0.1,
    tau_c: int = 1,
    **options: Options,
) -> StaleStrategy:
    """Merge every few updates, whatever their age, by AMSGrad with a delay-adaptive rate.

    Reference:
        Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization.
        ICML 2024.
    """
    parts = _with(options, weighting=ByAge(constant()), server_optimizer=fadas(rate, tau_c))
    return FedBuff(concurrency, buffer_size, **parts)


def AsyncFedED(  # noqa: N802
    concurrency: int, *, lam: float = 1.0, epsilon: float = 1.0, **options: Options
) -> StaleStrategy:
    """Step by each update at once, times lambda / (gamma + epsilon).

    Reference:
        Wang, Yang, He, Shi, Chen. AsyncFedED: Asynchronous Federated Learning with Euclidean
        Distance based Adaptive Weight Aggregation. 2022.
    """
    weighting = EuclideanStaleness(epsilon)
    return FedBuff(concurrency, 1, rate=lam / epsilon, **_with(options, weighting=weighting))


def CA2FL(  # noqa: N802
    concurrency: int,
    buffer_size: int | AdaSync = 10,
    *,
    rate: Rate = 1.0,
    n_clients: int | None = None,
    **options: Options,
) -> StaleStrategy:
    """Run FedBuff with updates calibrated by the last one of every device.

    Reference:
        Wang, Cao, Wu, Chen, Chen. Tackling the Data Heterogeneity in Asynchronous Federated
        Learning with Cached Update Calibration. ICLR 2024.
    """
    parts = _with(options, weighting=CachedUpdates(1.0, n_clients=n_clients))
    return FedBuff(concurrency, buffer_size, rate=rate, **parts)


def FedStale(  # noqa: N802
    concurrency: int | None = None,
    *,
    beta: float = 0.5,
    n_clients: int | None = None,
    **options: Options,
) -> StaleStrategy:
    """Run FedAvg, all devices alike, with the last update of those who do not take part.

    At beta = 1 this is FedVARP. It shares this package's name and nothing else.

    Reference:
        Rodio, Neglia. FedStale: Leveraging Stale Client Updates in Federated Learning. ECAI 2024.
    """
    return _compose(
        options,
        schedule=Schedule(concurrency=concurrency),
        weighting=CachedUpdates(beta, n_clients=n_clients),
        normalise="buffer_size",
    )


def AdaptiveSync(concurrency: int, start: int = 1, **options: Options) -> StaleStrategy:  # noqa: N802
    """Wait for more and more of the devices as the loss falls; forget the others each time.

    Reference:
        Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
    """
    size = AdaSync(start=start, most=concurrency, form="worker")
    return _compose(options, schedule=k_sync(concurrency, size), normalise="buffer_size")
