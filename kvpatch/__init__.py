"""vLLM's KV offloading on kvcached's elastic KV memory.

Importing this package switches kvpatch on for the process and its children,
unless ``KVPATCH=0``; the startup file imports it when ``KVPATCH=1``. Nothing of
vllm, torch or kvcached is imported here: the patches are applied when vllm is imported.

Raises:
    ImportError: vllm was imported before kvpatch in this process.
"""

from kvpatch.bootstrap import switch_on as _switch_on
from kvpatch.version import VERSION

__version__ = VERSION

_switch_on()
