//! How many bytes of host frames may be held: what the system can spare, asked at most each 100 ms.
//!
//! A trait, since whoever keeps one book of all page-locked memory of the process knows better:
//! see [`Runtime::set_host_room`](crate::Runtime::set_host_room). Holds no memory itself.

use std::time::{Duration, Instant};

use crate::host::allowance::SystemMemory;
use crate::host::mounts::SystemRoot;
use crate::sync::Mutex;

/// Who says how much page-locked host memory may be held.
pub trait HostRoom: Send + Sync {
    /// Bytes of host frames that may be held in all, `held_bytes` of which are now. Called with no
    /// lock of the library held, before frames are made and when memory is given back.
    fn allowed_bytes(&self, held_bytes: u64) -> u64;
}

/// What was read last counts this long.
const FRESH: Duration = Duration::from_millis(100);

/// The allowance as the system's numbers make it: see `host/allowance`.
pub struct SystemRoom {
    root: SystemRoot,
    limit_bytes: Option<u64>,
    read: Mutex<Option<(Instant, u64)>>,
}

impl SystemRoom {
    /// As a system shows itself below `root`, and `limit_bytes` at most.
    #[must_use]
    pub fn new(root: SystemRoot, limit_bytes: Option<u64>) -> Self {
        Self { root, limit_bytes, read: Mutex::new(None) }
    }
}

impl HostRoom for SystemRoom {
    fn allowed_bytes(&self, held_bytes: u64) -> u64 {
        let read = *self.read.lock();
        if let Some((_, bytes)) = read.filter(|(at, _)| at.elapsed() < FRESH) {
            return bytes;
        }
        // With no lock held: two threads may read it at once.
        let bytes = match SystemMemory::read(&self.root) {
            Ok(memory) => memory.allowance(held_bytes, memory.default_margin_bytes()).bytes,
            Err(error) => {
                log::warn!("no host frames: {error}");
                // What is held stays: nothing says that it is too much.
                held_bytes
            }
        };
        let bytes = bytes.min(self.limit_bytes.unwrap_or(u64::MAX));
        *self.read.lock() = Some((Instant::now(), bytes));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn what_is_held_is_part_of_what_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let meminfo = folder.path().join("proc/meminfo");
        let write = |available: u64| {
            let text = format!("MemTotal: {} kB\nMemAvailable: {available} kB\n", 16 << 20);
            std::fs::write(&meminfo, text).unwrap();
        };
        write(4 << 20);
        let room = SystemRoom::new(SystemRoot::new(folder.path()), None);
        // A sixteenth of the machine is everybody else's.
        assert_eq!(room.allowed_bytes(0), 3 * GIB);
        write(0);
        assert_eq!(room.allowed_bytes(GIB), 3 * GIB, "read just before");
        *room.read.lock() = None;
        assert_eq!(room.allowed_bytes(2 * GIB), GIB);
        std::fs::remove_file(&meminfo).unwrap();
        *room.read.lock() = None;
        assert_eq!(room.allowed_bytes(7), 7);
    }
}
