//! What a request that cannot be served comes to: numbers, and PyTorch's words for them.
//!
//! Owns the text of `torch.OutOfMemoryError`, which programs search for "CUDA out of memory." and
//! "Tried to allocate". Takes every number from others; throws nothing.

use std::fmt;

use crate::error::{Error, ErrorCode};
use crate::memory::budget::BudgetSource;
use crate::units::{DeviceOrdinal, GIB, KIB, MIB};

/// From here on PyTorch's own allocator names no size.
const NAMED_MAX: u64 = 1 << 60;

/// A request that was not served. Everything is as it was; the allocator stays usable.
#[derive(Clone, Debug, Default)]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub requested_bytes: u64,
    /// The device.
    pub device: DeviceOrdinal,
    /// Bytes of the whole device.
    pub capacity_bytes: u64,
    /// Bytes that the driver calls free.
    pub free_bytes: u64,
    /// Bytes of frames that may be held, weights and activations together.
    pub budget_bytes: u64,
    /// What determines the budget.
    pub budget_source: BudgetSource,
    /// The part of the budget that the allocator may take (`set_fraction`), in bytes, if it is less
    /// than the budget.
    pub limit_bytes: Option<u64>,
    /// Bytes of resident weights' pages.
    pub weights_bytes: u64,
    /// Bytes in live blocks.
    pub allocated_bytes: u64,
    /// Bytes of pages that the allocator holds.
    pub reserved_bytes: u64,
    /// Bytes of those that graph pools keep, with or without live blocks.
    pub pool_bytes: u64,
    /// Bytes in blocks that were freed and wait for streams.
    pub pending_bytes: u64,
    /// Why, where it is not for want of memory: the device is lost, the process ends, a wait was
    /// cancelled.
    pub cause: Option<Error>,
}

impl OutOfMemory {
    /// Whether memory is short, and not something else wrong.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        self.cause.is_none()
    }

    /// Whether the process is ending or has forked.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.cause.as_ref().is_some_and(|error| error.code() == ErrorCode::ProcessEnding)
    }

    /// What the program's author can do: the first thing that would help.
    fn advice(&self) -> &'static str {
        let most = self.limit_bytes.unwrap_or(self.budget_bytes).min(self.budget_bytes);
        if self.limit_bytes.is_some_and(|limit| limit < self.budget_bytes) {
            "A larger torch.cuda.set_per_process_memory_fraction allows more."
        } else if self.pool_bytes > 0 && self.pool_bytes >= self.requested_bytes {
            "CUDA graphs that are reset give their pools back."
        } else if self.requested_bytes > most && self.budget_source == BudgetSource::Limit {
            "It is more than the budget in all: give vbar a larger one, or ask for less at a time."
        } else if self.budget_source == BudgetSource::Limit {
            "Free tensors, or give vbar a larger budget."
        } else {
            "Free tensors, or end other programs on the device, which nvidia-smi lists."
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cause) = &self.cause {
            let bytes = Size(self.requested_bytes);
            return write!(f, "vbar could not allocate {bytes} on GPU {}: {cause}", self.device);
        }
        if self.requested_bytes >= NAMED_MAX {
            return f.write_str("CUDA out of memory. Tried to allocate more than 1EB memory.");
        }
        let limit = match self.limit_bytes {
            Some(bytes) => format!(" {} allowed by the memory fraction;", Size(bytes)),
            None => String::new(),
        };
        write!(
            f,
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which \
             {} is free.{limit} Of {} that vbar may hold ({}), {} is in weights and {} is reserved \
             by PyTorch: {} allocated, {} in graph pools, {} freed and still in use by a stream. \
             {}",
            Size(self.requested_bytes),
            self.device,
            Size(self.capacity_bytes),
            Size(self.free_bytes),
            Size(self.budget_bytes),
            self.budget_source.words(),
            Size(self.weights_bytes),
            Size(self.reserved_bytes),
            Size(self.allocated_bytes),
            Size(self.pool_bytes),
            Size(self.pending_bytes),
            self.advice(),
        )
    }
}

impl std::error::Error for OutOfMemory {}

/// A size as c10's `format_size` writes it: `512 bytes`, `1.50 KiB`, `512.00 MiB`, `2.00 GiB`.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            bytes if bytes <= KIB => return write!(f, "{bytes} bytes"),
            bytes if bytes <= MIB => (KIB, "KiB"),
            bytes if bytes <= GIB => (MIB, "MiB"),
            _ => (GIB, "GiB"),
        };
        write!(f, "{:.2} {name}", self.0 as f64 / unit as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_c10_writes_them() {
        let text = |bytes: u64| Size(bytes).to_string();
        assert_eq!(text(512), "512 bytes");
        assert_eq!(text(1536), "1.50 KiB");
        assert_eq!(text(512 * MIB), "512.00 MiB");
        assert_eq!(text(2 * GIB), "2.00 GiB");
        assert_eq!(text(2048 * GIB), "2048.00 GiB");
    }

    #[test]
    fn the_text_begins_as_pytorchs_does() {
        let short = OutOfMemory {
            requested_bytes: 2 * GIB,
            device: DeviceOrdinal(1),
            capacity_bytes: 8 * GIB,
            free_bytes: 512 * MIB,
            ..OutOfMemory::default()
        };
        let start = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of \
                     8.00 GiB of which 512.00 MiB is free.";
        assert!(short.to_string().starts_with(start), "{short}");
        let helps = |change: fn(&mut OutOfMemory)| {
            let mut changed = OutOfMemory { budget_bytes: 4 * GIB, ..short.clone() };
            change(&mut changed);
            changed.to_string()
        };
        assert!(helps(|_| {}).ends_with("give vbar a larger budget."));
        let free = helps(|it| it.budget_source = BudgetSource::DriverFree);
        assert!(free.ends_with("which nvidia-smi lists."), "{free}");
        assert!(helps(|it| it.budget_bytes = GIB).contains("more than the budget in all"));
        assert!(helps(|it| it.pool_bytes = 3 * GIB).contains("CUDA graphs"));
        assert!(helps(|it| it.limit_bytes = Some(GIB)).contains("memory_fraction"));
        let huge = OutOfMemory { requested_bytes: u64::MAX, ..OutOfMemory::default() };
        let text = "CUDA out of memory. Tried to allocate more than 1EB memory.";
        assert_eq!(huge.to_string(), text);
    }
}
