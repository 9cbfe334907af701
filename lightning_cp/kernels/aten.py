"""PyTorch's own fused operators that return the log-sum-exp."""

from lightning_cp.kernels.aten_cpu import AtenCpuFlash
from lightning_cp.kernels.aten_cuda import AtenCudaCudnn, AtenCudaFlash

__all__ = ["AtenCpuFlash", "AtenCudaCudnn", "AtenCudaFlash"]
