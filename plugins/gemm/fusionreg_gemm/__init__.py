"""The gemm family: matrix products with scale, bias and activation in one kernel."""
