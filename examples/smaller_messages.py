"""Send replies in full, in 8 bits and in 4 bits from the same phones, with a model of 56 MB."""

import fedstale

for stages in ("", "Compression('int8')", "Compression('int4')"):
    run = fedstale.simulate(
        "digits",
        traces="synthetic:60",
        until="1h",
        seed=1,
        # What the small model stands for.
        model_bytes=56_000_000,
        run_config={"strategy": f"FedBuff(10, 5, stages=[{stages}])"},
    )
    reported = run.jobs[run.jobs["status"] == "reported"]
    print(
        f"{stages or 'in full'}: {reported['uploaded_bytes'].median() / 1e6:.1f} MB a reply, "
        f"{len(reported)} replies in an hour, an upload takes "
        f"{reported['upload_s'].median():.0f} s"
    )
