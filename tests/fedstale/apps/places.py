"""Where the apps and the data of these tests are."""

from pathlib import Path

from fedstale.simulation.flower_app import BUILT_IN

PLAY = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt.gz"
TEMPLATE = BUILT_IN / "template" / "starter-app"
NAMES = ["digits", "fashion", "shakespeare"]
FOLDERS = [*(BUILT_IN / name for name in NAMES), TEMPLATE]
