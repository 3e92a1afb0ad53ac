"""As torch._inductor.config."""


class triton:
    cudagraphs = False
