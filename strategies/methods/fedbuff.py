"""FedBuff: a server step after every few updates, and the methods that change only a part of it."""

from typing import Unpack

from fedstale.strategies.schedule import Updates, k_batch_async
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import SGD, AMSGrad, DelayAdaptive, Rate, ServerOptimizer
from fedstale.strategies.types import Count, Positive, Share
from fedstale.strategies.weighting import (
    AgeCurve,
    ByAge,
    CachedUpdates,
    DirectionalGap,
    EuclideanStaleness,
    Gap,
    Grain,
    Weighting,
    constant,
    polynomial,
)

INVERSE_ROOT = polynomial(0.5)


def buffered(
    concurrency: Count,
    buffer_size: Updates,
    weighting: Weighting,
    server_optimizer: ServerOptimizer,
) -> Options:
    """Return the options of FedBuff and what is like it but for its weights and its steps."""
    return Options(
        schedule=k_batch_async(concurrency, buffer_size),
        weighting=weighting,
        server_optimizer=server_optimizer,
        normalise="buffer_size",
    )


class FedBuff(StaleStrategy):
    """Steps after every few updates, weighted by 1/sqrt(1 + tau) and divided by their number.

    Args:
        concurrency: jobs in flight, >= 1.
        buffer_size: updates of a server step, >= 1.
        staleness: weight of an update as a function of its staleness tau, exactly 1 at 0.
        eta: the server's learning rate, > 0, or a function of the number of the step.
        **options: of `StaleStrategy`.

    Reference:
        Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.

    Example:
        >>> FedBuff(20, 5, seed=1)  # doctest: +NORMALIZE_WHITESPACE
        FedBuff(concurrency=20, buffer_size=5, send='after_reply', stragglers='keep',
        weighting=ByAge(polynomial(a=0.5)), normalise='buffer_size', seed=1)
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        staleness: AgeCurve = INVERSE_ROOT,
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, buffer_size, ByAge(staleness), SGD(eta))
        super().__init__(**(parts | options))


class GapAware(StaleStrategy):
    """Runs FedBuff with updates divided by the gap instead of the root of their age.

    Args:
        of: one gap for each "parameter", for each "layer" or for the "model".
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        of: Grain = "parameter",
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**(buffered(concurrency, buffer_size, Gap(of=of), SGD(eta)) | options))


class DirectionAware(StaleStrategy):
    """Runs FedBuff with updates divided by the directional gap; fedstale's own.

    Args:
        share: of the plain gap that counts in any direction, in [0, 1].
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        share: Share = 0.1,
        eta: Rate = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, buffer_size, DirectionalGap(share=share), SGD(eta))
        super().__init__(**(parts | options))


class CA2FL(StaleStrategy):
    """Runs FedBuff, whatever the age, with updates calibrated by the last one of every device.

    Args:
        n_clients: number of devices that there are, if it is known; >= 1.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Cao, Wu, Chen, Chen. Tackling the Data Heterogeneity in Asynchronous Federated
        Learning with Cached Update Calibration. ICLR 2024.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        eta: Rate = 1.0,
        n_clients: Count | None = None,
        **options: Unpack[Options],
    ) -> None:
        cached = CachedUpdates(1.0, n_clients=n_clients)
        super().__init__(**(buffered(concurrency, buffer_size, cached, SGD(eta)) | options))


class FADAS(StaleStrategy):
    """Steps after every few updates, whatever their age, by AMSGrad with a delay-adaptive rate.

    Args:
        tau_c: largest staleness that leaves eta alone, an integer >= 1.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Wang, Lu, Chen. FADAS: Towards Federated Adaptive Asynchronous Optimization.
        ICML 2024.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Updates = 10,
        *,
        eta: Rate = 0.1,
        tau_c: Count = 1,
        **options: Unpack[Options],
    ) -> None:
        optimizer = DelayAdaptive(AMSGrad(eta), tau_c)
        parts = buffered(concurrency, buffer_size, ByAge(constant()), optimizer)
        super().__init__(**(parts | options))


class FedAsync(StaleStrategy):
    """Mixes each reply into the model: theta <- (1 - a s(tau)) theta + a s(tau) theta_i.

    Args:
        mix: a, > 0, or a function of the number of the step.
        staleness: s, a function of the staleness tau, exactly 1 at 0.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
    """

    def __init__(
        self,
        concurrency: Count,
        *,
        mix: Rate = 0.6,
        staleness: AgeCurve = INVERSE_ROOT,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, 1, ByAge(staleness), SGD(mix))
        super().__init__(**(parts | Options(update="model") | options))


class AsyncFedED(StaleStrategy):
    """Steps by each update as it comes, times lambda / (gamma + epsilon).

    Args:
        lam: lambda, > 0.
        epsilon: number > 0; gamma is how far the model has moved, in lengths of the update.
        **options: of `StaleStrategy`; other arguments as for `FedBuff`.

    Reference:
        Wang, Yang, He, Shi, Chen. AsyncFedED: Asynchronous Federated Learning with Euclidean
        Distance based Adaptive Weight Aggregation. 2022.
    """

    def __init__(
        self,
        concurrency: Count,
        *,
        lam: Positive = 1.0,
        epsilon: Positive = 1.0,
        **options: Unpack[Options],
    ) -> None:
        parts = buffered(concurrency, 1, EuclideanStaleness(epsilon), SGD(lam / epsilon))
        super().__init__(**(parts | options))
