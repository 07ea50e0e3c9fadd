"""Drive pfl-research's simulation through a scenario: rounds without a clock.

Cohorts, statistics, their average and the step of the server are pfl's; a client trains as the
scenario says, in place of pfl's loop over batches.
"""

import contextlib
import importlib.metadata
import os

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.context import CentralContext
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import WeightedStatistics
from scenario import Answer, Model, Scenario, answer, clock


class Weights(torch.nn.Module):
    """The model of the scenario."""

    def __init__(self, first: Model) -> None:
        super().__init__()
        self.each = torch.nn.ParameterList(map(torch.from_numpy, first))

    def arrays(self) -> Model:
        """Return copies of the values."""
        return [p.detach().numpy().copy() for p in self.each]

    def metrics(self, *data: torch.Tensor) -> dict[str, object]:
        """Return nothing: the first round is evaluated whether asked for or not."""
        return {}

    loss = metrics


class Rounds(FederatedAveraging):
    """Federated averaging whose clients train as the scenario says."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._scenario = scenario

    def train_one_user(
        self,
        initial_model_state: WeightedStatistics,
        model: PyTorchModel,
        user_dataset: Dataset,
        central_context: CentralContext,
    ) -> tuple[WeightedStatistics, Metrics]:
        """Return the difference that the next job of a client makes."""
        weights = model.pytorch_model
        trained = self._scenario.train(int(user_dataset.user_id), weights.arrays())
        with torch.no_grad():
            for parameter, array in zip(weights.each, trained, strict=True):
                parameter.copy_(torch.from_numpy(array))
        return model.get_model_difference(initial_model_state), Metrics()


def run(scenario: Scenario) -> Answer:
    """Return what pfl makes of a scenario; events have no instants."""
    if scenario.rule != "FedAvg":
        raise ValueError(f"rule = {scenario.rule!r}: expected FedAvg; pfl has no clock")
    began = clock()
    rounds, n = scenario.updates // scenario.n, scenario.n
    turn = iter(range(rounds * n))
    data = FederatedDataset(
        lambda client: Dataset(raw_data=[torch.zeros(1)], user_id=str(client)),
        lambda: next(turn) % n,
    )
    weights = Weights(scenario.first())
    model = PyTorchModel(
        model=weights,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(weights.parameters(), lr=1.0),
    )
    backend = SimulatedBackend(training_data=data, val_data=None, postprocessors=[WeightByUser()])
    ready = clock()
    with open(os.devnull, "w") as nothing_said, contextlib.redirect_stdout(nothing_said):
        Rounds(scenario).run(
            backend=backend,
            model=model,
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=rounds + 1,
                train_cohort_size=n,
                val_cohort_size=0,
            ),
            model_train_params=NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=1.0, local_batch_size=None
            ),
            model_eval_params=NNEvalHyperParams(local_batch_size=None),
            callbacks=[],
        )
    done = clock()
    nothing = float("nan")
    events = [(nothing, i, v, nothing) for v in range(rounds) for i in range(n)]
    version = importlib.metadata.version("pfl")
    return Answer(version, events, weights.arrays(), done - ready, ready - began)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(run)
