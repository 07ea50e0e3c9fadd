"""Compare three weightings of stale updates over two seeds, each on the same devices."""

import fedstale

PLAN = {
    "app": "digits",
    "traces": "synthetic:60",
    "until": "90m",
    "seeds": [1, 2],  # two show how it is done; a claim needs five or more
    "target": "accuracy 0.6",
    "variants": {
        "constant": {"run-config": {"strategy": "FedBuff(20, 5, staleness=constant())"}},
        "polynomial": {"run-config": {"strategy": "FedBuff(20, 5, staleness=polynomial(0.5))"}},
        "gap-aware": {"run-config": {"strategy": "GapAware(20, 5)"}},
    },
}

comparison = fedstale.compare(PLAN, out="runs/weightings", overwrite=True)
means = comparison.table.pivot(index="variant", columns="measure", values="mean")
means["minutes to 0.6"] = means["time_to_target_s"] / 60
means["device-hours"] = means["device_s"] / 3600
columns = ["minutes to 0.6", "server accuracy", "device-hours", "device_time_wasted"]
print(means[columns].round({"minutes to 0.6": 0}).round(2).to_string())
print("intervals and differences: runs/weightings/comparison.html")
