"""The training pool: Megatron-core ranks that turn streamed groups into one strictly on-policy step per batch."""

import logging
import warnings

# Megatron warns once per missing optional package on import; the fallbacks are the intended ones.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed", category=UserWarning)
# Megatron logs its setup, config by config, at INFO.
logging.getLogger("megatron").setLevel(logging.WARNING)
