"""As torch._guards: what the compiler has at hand while it traces, which is nothing here."""


class TracingContext:
    @staticmethod
    def try_get():
        return None
