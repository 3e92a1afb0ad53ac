"""As torch._inductor.config."""


class triton:
    cudagraph_trees = True
