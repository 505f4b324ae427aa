"""The training pool: Megatron-core ranks that turn streamed groups into one strictly on-policy step per batch."""

import logging
import warnings

# Said once per missing optional package while Megatron is imported; the fall-backs are the ones that are wanted here.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed", category=UserWarning)
# Its own set-up, config by config, at INFO.
logging.getLogger("megatron").setLevel(logging.WARNING)
