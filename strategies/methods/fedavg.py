"""FedAvg: rounds that wait for every reply, and the methods that change only a part of it."""

from typing import Unpack

from fedstale.strategies.schedule import Overhead, Schedule, over_selection
from fedstale.strategies.server import Options, StaleStrategy
from fedstale.strategies.server_optimizer import Adagrad, Adam, Momentum, Rate, Yogi
from fedstale.strategies.types import Count, Decay, NotNegative, Positive, PositiveShare


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

    Differences from the paper:
        Clients are drawn alike and their models weighted by examples, as in Flower; the paper draws
        them by their examples and takes the plain mean.

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
