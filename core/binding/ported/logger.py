"""``init_logger`` and opgraft's logger, under the names in vLLM."""

from opgraft.base.log import init_logger as init_logger
from opgraft.base.log import logger as logger
