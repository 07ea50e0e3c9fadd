"""The published recordings that fedstale reads: where they are from and what they know.

A table and nothing else: `fetch` downloads by it, `read` reads by it, and the page on traces is
compared with it. A checksum is stated only where the published file itself was seen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedstale.traces.sources import aibenchmark, fedscale, flash, gnettrack, mahimahi, planetlab
from fedstale.traces.trace_set import TraceSet

_GITHUB = "https://github.com/"
_FEDSCALE = "SymbioticLab/FedScale/raw/HEAD/benchmark/dataset/data/device_info/"
_MAHIMAHI = "ravinet/mahimahi/raw/{}/traces/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file as its authors publish it."""

    filename: str
    """Name to keep it under."""
    url: str
    """Where it is downloaded from."""
    size_bytes: int | None = None
    """Size, where the published file was seen."""
    sha256: str | None = None
    """Checksum, where the published file was seen; None means it is recorded at the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """One kind of recording, and the published example of it."""

    name: str
    """What it is called here."""
    about: str
    """What was recorded, in a line."""
    reader: Callable[[str | Path], TraceSet]
    """Reads a file or folder of this kind."""
    channels: tuple[str, ...]
    """What the reader learns from it by default."""
    compute_unit: str | None
    """What one unit of work is; None where compute is not known."""
    origin: str
    """Authors or project, and the repository that publishes it."""
    licence: str
    """Under which terms, as stated there."""
    files: tuple[RemoteFile, ...]
    """What `fetch` downloads."""

    @property
    def licence_line(self) -> str:
        """One line to print when the recording is downloaded."""
        return f"{self.name}: {self.origin}; licence: {self.licence}"


def _mahimahi_file(name: str, size_bytes: int, sha256: str) -> RemoteFile:
    short = name.startswith("TMobile-LTE-short")
    commit = (
        "c0613183586e6c71b7e13eb55cdd6aa1129bc882"
        if short
        else "1a775777d2f8e667c59447bf0ff268178b6ff4ad"
    )
    url = _GITHUB + _MAHIMAHI.format(commit) + name
    return RemoteFile(filename=name, url=url, size_bytes=size_bytes, sha256=sha256)


_ALL = (
    TraceSource(
        name="flash",
        about="phones that were idle, charging and on Wi-Fi",
        reader=flash.read,
        channels=("availability",),
        compute_unit=None,
        origin="FLASH (The Web Conference 2021), its early public fork zhurboo/mini-leaf",
        licence="BSD-2-Clause (of FLASH)",
        files=(
            RemoteFile(
                filename="ready_strict.json",
                url=_GITHUB + "zhurboo/mini-leaf/raw/HEAD/data/ready_strict.json",
            ),
        ),
    ),
    TraceSource(
        name="gnettrack",
        about="4G and 5G links of an Irish operator, once a second",
        reader=gnettrack.read,
        channels=("downlink",),
        compute_unit=None,
        origin="5G dataset (ACM MMSys 2020), uccmisl/5Gdataset",
        licence="GPL-3.0",
        files=(
            RemoteFile(
                filename="5G-production-dataset.zip",
                url=_GITHUB + "uccmisl/5Gdataset/raw/3175653a6fc09611b7dba15e0e128183e6af7c6c/"
                "5G-production-dataset.zip",
                size_bytes=2_177_094,
                sha256="abc729d696b5e0ba34a9c6ed35a851f2868d2b5071be5efb8a49691c23bb1a9b",
            ),
        ),
    ),
    TraceSource(
        name="mahimahi",
        about="capacity of cellular links in both directions, from a saturating sender",
        reader=mahimahi.read,
        channels=("downlink", "uplink"),
        compute_unit=None,
        origin="Saturator (NSDI 2013), ravinet/mahimahi",
        licence="GPL (see COPYING there)",
        files=(
            _mahimahi_file(
                "ATT-LTE-driving.down",
                2_306_644,
                "73c58f41bf7a3f0fac82810ca61307521be1cf6b77a0e98093fd340bddfd161f",
            ),
            _mahimahi_file(
                "ATT-LTE-driving.up",
                483_248,
                "d58a640b9bccd131a421bff6eaf727aba324d9258b35009655bbf68e087b9b29",
            ),
            _mahimahi_file(
                "TMobile-LTE-short.down",
                1_211_415,
                "4f33dce8dd811b5702272af64aaf64d3913719919abd776edf1e0f7c0965da43",
            ),
            _mahimahi_file(
                "TMobile-LTE-short.up",
                1_005_225,
                "1c0d1bf5417b07597724fd64afe676af3c1f337a4ccdde90106bf96b1bcf18b2",
            ),
            _mahimahi_file(
                "TMobile-UMTS-driving.down",
                1_081_622,
                "c97a74e7e6cf593d93b59f73db614bc6186bef510531636ad9961a3b9fc18024",
            ),
            _mahimahi_file(
                "TMobile-UMTS-driving.up",
                506_697,
                "f2dc7c8e57f4cf525fefaff2d68c18a9118fd1382ce9c240b1d324a2a60f8a65",
            ),
            _mahimahi_file(
                "Verizon-LTE-short.down",
                365_580,
                "c918436fbd6246af134c76585d9395881fdd27203c59a8902b9a7c675b8a8e3e",
            ),
            _mahimahi_file(
                "Verizon-LTE-short.up",
                434_258,
                "f6cd9049f58d70f12545772a3482ded085b6d50f06a2f4ff4afcfb6fe7976dcc",
            ),
        ),
    ),
    TraceSource(
        name="planetlab",
        about="processor load of servers, every five minutes over a day",
        reader=planetlab.read,
        channels=("compute",),
        compute_unit=planetlab.COMPUTE_UNIT,
        origin="CoMon, as it comes with Cloudslab/cloudsim",
        licence="LGPL (see the repository)",
        files=(
            RemoteFile(
                filename="cloudsim.tar.gz",
                url=_GITHUB
                + "Cloudslab/cloudsim/archive/4529b632fc2d11b0f4d17610a546cee433b01a22.tar.gz",
            ),
        ),
    ),
    TraceSource(
        name="aibenchmark",
        about="speed of phone models",
        reader=aibenchmark.read,
        channels=("compute",),
        compute_unit=aibenchmark.COMPUTE_UNIT,
        origin="AI Benchmark, as it comes with PKU-Chengxu/FLASH",
        licence="BSD-2-Clause",
        files=(
            RemoteFile(
                filename="raw_ai_benchmark_list.json",
                url=_GITHUB + "PKU-Chengxu/FLASH/raw/70e47eb2a802e1c79e1a9f9f84a4aee818cd15a8/"
                "models/utils/device_util/raw_ai_benchmark_list.json",
            ),
        ),
    ),
    TraceSource(
        name="fedscale_behaviour",
        about="clients that were there",
        reader=fedscale.read_behaviour,
        channels=("availability",),
        compute_unit=None,
        origin="FedScale (ICML 2022), SymbioticLab/FedScale",
        licence="Apache-2.0",
        files=(
            RemoteFile(
                filename="client_behave_trace",
                url=_GITHUB + _FEDSCALE + "client_behave_trace",
                size_bytes=25_640_150,
                sha256="d0b6f81a01f0ea5f7ec432583f5afe93b1e72424db4c1affa88c484f15901662",
            ),
        ),
    ),
    TraceSource(
        name="fedscale_capacity",
        about="speed and bandwidth of clients",
        reader=fedscale.read_capacity,
        channels=("compute", "downlink", "uplink"),
        compute_unit=fedscale.COMPUTE_UNIT,
        origin="FedScale (ICML 2022), SymbioticLab/FedScale",
        licence="Apache-2.0",
        files=(
            RemoteFile(
                filename="client_device_capacity",
                url=_GITHUB + _FEDSCALE + "client_device_capacity",
            ),
        ),
    ),
)

SOURCES: Mapping[str, TraceSource] = MappingProxyType({source.name: source for source in _ALL})
