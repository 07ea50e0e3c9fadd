"""Send replies in full, in 8 bits and in 4 bits from the same phones, with a model of 56 MB."""

import fedstale

if __name__ == "__main__":  # clients may train in processes of their own
    for form in ("", "int8", "int4"):
        run = fedstale.simulate(
            "digits",
            traces="synthetic:60",
            until="1h",
            seed=1,
            model_bytes=56_000_000,  # what the small model stands for
            run_config={"strategy": "fedbuff", "messages": form},
        )
        reported = run.jobs[run.jobs["status"] == "reported"]
        print(
            f"{form or 'in full'}: {reported['uploaded_bytes'].median() / 1e6:.1f} MB a reply, "
            f"{len(reported)} replies in an hour, an upload takes "
            f"{reported['upload_s'].median():.0f} s"
        )
