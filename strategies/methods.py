"""The published methods: classes that compose the parts of a `StaleStrategy`.

A class adds no behaviour of its own. It takes its own settings first, then any option of
`StaleStrategy`, which replaces the part that the class would have composed:
`FedBuff(20, 5, selector=Oort())`. The parts, which go with any method, are in `selection`,
`schedule`, `pace`, `weighting`, `robust` and `server_optimizer`. First come those with rounds, then
those with a step after every few updates.
"""

from typing import Unpack

from fedstale.strategies.schedule import (
    Overhead,
    Schedule,
    Updates,
    k_async,
    k_batch_async,
    over_selection,
)
from fedstale.strategies.selection import LeastAvailable
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import (
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    DelayAdaptive,
    Momentum,
    Rate,
    ServerOptimizer,
    Yogi,
)
from fedstale.strategies.types import Count, Decay, NotNegative, Positive, PositiveShare, Share
from fedstale.strategies.weighting import (
    AgeCurve,
    ByAge,
    CachedUpdates,
    DirectionalGap,
    EuclideanStaleness,
    Gap,
    Grain,
    RelevanceAware,
    Weighting,
    constant,
    polynomial,
)

INVERSE_ROOT = polynomial(0.5)


class RoundOptions(Options, total=False):
    """The settings that `FedAvg` adds to those of `StaleStrategy`."""

    fraction_train: float
    min_available_nodes: int


class FedAvg(StaleStrategy):
    """Sends to some nodes or to all, waits for every reply, and averages by examples.

    Args:
        concurrency: nodes to send to; all that are free if not given.
        fraction_train: share of the free nodes to send to instead, in (0, 1], at least one.
        min_available_nodes: free nodes to wait for before sending, >= 1; Flower's default is 2.
        **options: of `StaleStrategy`.

    Reference:
        McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data.
        AISTATS 2017.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        *,
        fraction_train: PositiveShare = 1.0,
        min_available_nodes: Count = 1,
        **options: Unpack[Options],
    ) -> None:
        schedule = Schedule(
            concurrency=concurrency,
            fraction_train=fraction_train,
            min_available_nodes=min_available_nodes,
        )
        super().__init__(**(Options(schedule=schedule) | options))


class FedAvgOverSelected(StaleStrategy):
    """Sends to more nodes than needed, averages the first replies, and cancels the other jobs.

    Args:
        buffer_size: replies to wait for, >= 1.
        factor: nodes to send to, over `buffer_size`, >= 1.
        **options: of `StaleStrategy`.

    Reference:
        Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019.
    """

    def __init__(
        self, buffer_size: Count, factor: Overhead = 1.3, **options: Unpack[Options]
    ) -> None:
        super().__init__(**(Options(schedule=over_selection(buffer_size, factor)) | options))


class FedProx(FedAvg):
    """Runs FedAvg with clients that add mu/2 |w - w_received|^2 to their loss.

    A client reads mu from its config as `proximal-mu`, as with Flower's strategy of this name; one
    that does not is a client of FedAvg.

    Args:
        proximal_mu: mu, >= 0; Flower's default is 0.
        **options: of `FedAvg`; other arguments as for `FedAvg`.

    Reference:
        Li et al. Federated Optimization in Heterogeneous Networks. MLSys 2020.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        *,
        proximal_mu: NotNegative = 0.01,
        **options: Unpack[RoundOptions],
    ) -> None:
        super().__init__(concurrency, **options)
        self.train_config = {"proximal-mu": proximal_mu}

    def settings(self) -> dict[str, str]:
        """Return mu too; it is always sent."""
        return {"proximal_mu": repr(self.train_config["proximal-mu"]), **super().settings()}


class FedAvgM(FedAvg):
    """Runs FedAvg with momentum on the server.

    Args:
        server_learning_rate: number > 0, or a function of the number of the step.
        server_momentum: in [0, 1); Flower's default is 0, which is FedAvg.
        **options: of `FedAvg`; other arguments as for `FedAvg`.

    Reference:
        Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated
        Visual Classification. 2019.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        *,
        server_learning_rate: Rate = 1.0,
        server_momentum: Decay = 0.9,
        **options: Unpack[RoundOptions],
    ) -> None:
        optimizer = Momentum(server_learning_rate, beta=server_momentum)
        super().__init__(concurrency, **(RoundOptions(server_optimizer=optimizer) | options))


class FedAdam(FedAvg):
    """Runs FedAvg with Adam on the server.

    Args:
        eta: the server's learning rate, > 0, or a function of the number of the step.
        beta_1: decay of the first moment, in [0, 1).
        beta_2: decay of the second moment, in [0, 1).
        tau: degree of adaptability, > 0.
        **options: of `FedAvg`; other arguments as for `FedAvg`.

    Reference:
        Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        eta: Rate = 0.1,
        *,
        beta_1: Decay = 0.9,
        beta_2: Decay = 0.99,
        tau: Positive = 1e-3,
        **options: Unpack[RoundOptions],
    ) -> None:
        optimizer = Adam(eta, beta_1=beta_1, beta_2=beta_2, tau=tau)
        super().__init__(concurrency, **(RoundOptions(server_optimizer=optimizer) | options))


class FedYogi(FedAvg):
    """Runs FedAvg with Yogi on the server; arguments and reference as for `FedAdam`."""

    def __init__(
        self,
        concurrency: Count | None = None,
        eta: Rate = 0.01,
        *,
        beta_1: Decay = 0.9,
        beta_2: Decay = 0.99,
        tau: Positive = 1e-3,
        **options: Unpack[RoundOptions],
    ) -> None:
        optimizer = Yogi(eta, beta_1=beta_1, beta_2=beta_2, tau=tau)
        super().__init__(concurrency, **(RoundOptions(server_optimizer=optimizer) | options))


class FedAdagrad(FedAvg):
    """Runs FedAvg with Adagrad on the server; arguments and reference as for `FedAdam`."""

    def __init__(
        self,
        concurrency: Count | None = None,
        eta: Rate = 0.1,
        *,
        tau: Positive = 1e-3,
        **options: Unpack[RoundOptions],
    ) -> None:
        optimizer = Adagrad(eta, tau=tau)
        super().__init__(concurrency, **(RoundOptions(server_optimizer=optimizer) | options))


class FedStale(FedAvg):
    """Runs FedAvg, all devices alike, with the last update of those who do not take part.

    At beta = 1 this is FedVARP. It shares this package's name and nothing else.

    Args:
        beta: how far cached updates count, in [0, 1].
        n_clients: number of devices that there are, if it is known; >= 1.
        **options: of `FedAvg`; other arguments as for `FedAvg`.

    Reference:
        Rodio, Neglia. FedStale: Leveraging Stale Client Updates in Federated Learning. ECAI 2024.
    """

    def __init__(
        self,
        concurrency: Count | None = None,
        *,
        beta: Share = 0.5,
        n_clients: Count | None = None,
        **options: Unpack[RoundOptions],
    ) -> None:
        cached = CachedUpdates(beta, n_clients=n_clients)
        parts = RoundOptions(weighting=cached, normalise="buffer_size")
        super().__init__(concurrency, **(parts | options))


class REFL(StaleStrategy):
    """Picks devices that will rarely be online, steps without the last, and weighs those later.

    Args:
        concurrency: jobs in flight, >= 1.
        buffer_size: updates of a server step, >= 1.
        beta: share of the deviation in the weight of a stale update, in [0, 1].
        **options: of `StaleStrategy`.

    Reference:
        Abdelmoniem, Sahu, Canini, Fahmy. REFL: Resource-Efficient Federated Learning.
        EuroSys 2023.
    """

    def __init__(
        self,
        concurrency: Count,
        buffer_size: Count = 10,
        *,
        beta: Share = 0.35,
        **options: Unpack[Options],
    ) -> None:
        parts = Options(
            selector=LeastAvailable(),
            schedule=k_async(concurrency, buffer_size),
            weighting=RelevanceAware(beta),
            normalise="weights",
        )
        super().__init__(**(parts | options))


def buffered(
    concurrency: Count, buffer_size: Updates, weighting: Weighting, optimizer: ServerOptimizer
) -> Options:
    """Return the options of FedBuff and what is like it but for its weights and its steps."""
    return Options(
        schedule=k_batch_async(concurrency, buffer_size),
        weighting=weighting,
        server_optimizer=optimizer,
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
