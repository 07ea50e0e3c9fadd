"""Where the apps and the data of these tests are."""

from pathlib import Path

from fedstale.simulation.flower_app import BUILT_IN

PLAY = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt.gz"
TEMPLATE = BUILT_IN / "template" / "starter-app"
FOLDERS = [BUILT_IN / "digits", BUILT_IN / "shakespeare", TEMPLATE]
