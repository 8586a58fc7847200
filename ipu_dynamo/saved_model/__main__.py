"""Be what `python -m ipu_dynamo.saved_model` runs."""

import sys

from ipu_dynamo.saved_model.command.main import main

if __name__ == "__main__":
    sys.exit(main())
