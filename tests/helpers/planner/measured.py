"""What a machine might have reached, of which tests count what they expect."""

from __future__ import annotations

from lightning_cp.planner.hardware import ComputeRate, Hardware, KernelRate, LinkRate, OverheadRate

KERNEL = ("aten_cpu_flash", "float32", 32)
MEASURED = Hardware(
    "cpu",
    "a CPU",
    devices=4,
    devices_per_node=4,
    memory_bytes=1 << 32,
    torch_version="2.13.0",
    backend="gloo",
    kernels=(
        KernelRate(*KERNEL, "full", 4096, 0.09, 0.11),
        KernelRate(*KERNEL, "causal", 4096, 0.08, 0.1),
    ),
    links=(
        *(LinkRate("ring", "p2p", 4 // n, n, 1.0, 1e-4, 0.4) for n in (2, 4)),
        *(LinkRate("ulysses", "all-to-all", n, 4 // n, 0.5, 2e-4, 1.5) for n in (2, 4)),
        *(LinkRate("ring", "all-gather", 4 // n, n, 0.8, 1e-4, 1.0) for n in (2, 4)),
        *(LinkRate("ring", "reduce-scatter", 4 // n, n, 0.8, 1e-4, 1.0) for n in (2, 4)),
        LinkRate("loss", "all-reduce", 1, 4, 0.1, 1e-3, 0.6),
    ),
    kernel_lengths=(
        KernelRate(*KERNEL, "full", 256, 0.045, 0.055),
        KernelRate(*KERNEL, "full", 4096, 0.09, 0.11),
        KernelRate(*KERNEL, "causal", 256, 0.02, 0.025),
        KernelRate(*KERNEL, "causal", 4096, 0.08, 0.1),
    ),
    compute=(ComputeRate("float32", 0.13, 8.0, 10.0, 7.0),),
    overheads=(
        OverheadRate("alone", 1, 1e-3, 2e-3),
        *(OverheadRate("ulysses", n, 3e-3, 2e-3 * n, 0.5e-3) for n in (2, 4)),
        *(OverheadRate("ring", n, 1e-3 + 1.5e-3 * (n - 1), 2e-3 * n, 0.5e-3) for n in (2, 4)),
        *(OverheadRate("zigzag_llama3", n, 4e-3, 2e-3 * n, 0.5e-3) for n in (2, 4)),
    ),
)
"""On one machine, with four ranks."""
