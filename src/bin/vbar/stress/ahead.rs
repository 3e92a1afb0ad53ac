//! Operations that let the library work ahead of the program: an order, wishes, lies about both.

use vbar::{Fault, Result};

use super::worker::Worker;

/// Tensors that one operation uses in order; each is a check.
const STRETCH: usize = 8;

impl Worker<'_> {
    /// The tensors that come next, one after the other; behind the last one comes the first.
    pub(super) fn use_in_order(&mut self) -> Result<()> {
        let stream = self.lasting_stream();
        let count = self.world.tensors.len();
        let first = self.next_tensor;
        self.tell(|| format!("{STRETCH} tensors from {first} on {stream:?}"));
        let bound = self.world.bound();
        let _usage = bound.usage.0.read();
        for tensor in (first..first + STRETCH).map(|tensor| tensor % count) {
            self.next_tensor = (tensor + 1) % count;
            if let Fault::Resident(guard) = bound.bar.fault(tensor, stream)? {
                self.check_tensor(guard.address(), tensor, stream)?;
                guard.unpin()?;
            }
        }
        Ok(())
    }

    /// A tensor is wished for, and perhaps used some time.
    pub(super) fn wish(&mut self) -> Result<()> {
        let tensor = self.choice.index(self.world.tensors.len());
        self.tell(|| format!("wish for tensor {tensor}"));
        self.world.bound().bar.prefetch(tensor)
    }

    /// An order that nobody keeps to for long.
    pub(super) fn hint(&mut self) -> Result<()> {
        let count = self.world.tensors.len();
        let (length, step) = (1 + self.choice.index(count), 1 + self.choice.index(5));
        self.tell(|| format!("hint of {length} tensors, each {step} behind the other"));
        let order: Vec<usize> = (0..length).map(|at| at * step % count).collect();
        self.world.bound().bar.schedule_hint(&order)
    }
}
