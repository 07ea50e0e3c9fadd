"""Simulate a built-in app on synthetic phones, and say what it reached and what it cost."""

import fedstale

run = fedstale.simulate(
    "digits",
    traces="synthetic:60",
    until="1h",  # of the devices; the simulation takes seconds
    seed=1,
    run_config={"strategy": "FedBuff(10, 5)"},
    out="runs/first",
    overwrite=True,
)
print(f"{run.status}: {run.reason}")

print(f"accuracy 0.6 after {run.time_to('accuracy 0.6') / 60:.0f} minutes")

print(f"{run.costs['jobs']:.0f} jobs, {run.costs['device_s'] / 3600:.1f} device-hours")
print(f"{run.costs['device_time_wasted']:.0%} of them wasted:")
wasted = run.jobs[run.jobs["outcome"] == "wasted"]
print((wasted.groupby("status")["busy_s"].sum() / 3600).round(1).to_string(header=False))

print(f"report: {run.report()}")
