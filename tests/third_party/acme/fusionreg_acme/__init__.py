from fusionreg import FusionSpec, KernelSpec, hookimpl

BIAS_RELU2 = FusionSpec(
    api=1, name="acme.bias_relu2", summary="square of relu(x + bias)",
    pattern="h = Relu(Add(x, bias))\ny = Mul(h, h)",
    inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}, dtypes={"T": ("float16", "bfloat16", "float32")},
    kernels=[KernelSpec(name="plain", template="bias_relu2.cu.j2", grid="ceildiv(M * N, 256)", block="256")],
)

@hookimpl
def register_fusions():
    return [BIAS_RELU2]
