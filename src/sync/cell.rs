//! Memory that several threads reach, as loom's cell has it: each access is a closure, so that a
//! model checker can tell one that nothing orders. Here it is the standard library's, at no cost.

/// See the module's text.
#[cfg_attr(vbar_loom, allow(dead_code, reason = "loom's stands in for it"))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg_attr(vbar_loom, allow(dead_code, reason = "loom's stands in for it"))]
impl<T> UnsafeCell<T> {
    /// With a value in it.
    #[inline(always)]
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Where the value is, to be read. Nobody writes meanwhile.
    #[inline(always)]
    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Where the value is, to be written. Nobody else reaches it meanwhile.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
