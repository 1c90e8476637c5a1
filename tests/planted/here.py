"""Whether a known-bad copy can run here: where its shipped kernel can."""

import torch

from verify.variant import Variant


def unavailable(shipped: Variant) -> str | None:
    """Why a copy of that variant cannot run here, or None."""
    reason = shipped.available() if shipped.available is not None else None
    least, most = shipped.support.capability, shipped.support.max_capability
    if reason is not None:
        return reason
    if not torch.cuda.is_available():
        return "no CUDA device"
    own = torch.cuda.get_device_capability()
    if own < least:
        return f"needs compute capability {least[0]}.{least[1]}"
    if most is not None and own > most:
        return f"needs at most compute capability {most[0]}.{most[1]}"
    return None
