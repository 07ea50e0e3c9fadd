"""The LSTM forecaster: a forward pass in NumPy, and its training in torch."""

from fedstale.traces.forecast.lstm.model import LSTM

__all__ = ["LSTM"]
