"""Hold the options of the core, checked once where they enter."""

from ipu_dynamo.errors import OptionError as OptionError
from ipu_dynamo.options.anchors import Anchor as Anchor
from ipu_dynamo.options.checks import check_choices as check_choices
from ipu_dynamo.options.checks import check_count as check_count
from ipu_dynamo.options.checks import check_names as check_names
from ipu_dynamo.options.checks import named_options as named_options
from ipu_dynamo.options.locations import Location as Location
from ipu_dynamo.options.locations import Locations as Locations
from ipu_dynamo.options.loss_scaling import AutomaticLossScaling as AutomaticLossScaling
from ipu_dynamo.options.options import Check as Check
from ipu_dynamo.options.options import Choice as Choice
from ipu_dynamo.options.options import Engine as Engine
from ipu_dynamo.options.options import Options as Options
from ipu_dynamo.options.options import Outlining as Outlining
from ipu_dynamo.options.options import OutputMode as OutputMode
from ipu_dynamo.options.options import Recomputation as Recomputation
from ipu_dynamo.options.options import SyncPattern as SyncPattern
from ipu_dynamo.options.strategy import PARALLEL_LIVENESS as PARALLEL_LIVENESS
from ipu_dynamo.options.strategy import Costs as Costs
from ipu_dynamo.options.strategy import Liveness as Liveness
from ipu_dynamo.options.strategy import StageSpec as StageSpec
from ipu_dynamo.options.strategy import Strategy as Strategy
from ipu_dynamo.options.strategy import StrategyKind as StrategyKind
