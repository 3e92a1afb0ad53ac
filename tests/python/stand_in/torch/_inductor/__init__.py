"""As torch._inductor."""
