//! The memory of a simulated device: a sealed memory file, a count, and who else uses it.
//!
//! Owns the file, the device's own window onto it and which ranges of it are frames. Devices are
//! shared by simulated processes. The file is sparse and twice the capacity, so that frames of
//! several sizes never fail for fragmentation, which real page tables do not know; the count of
//! bytes is the limit. Does not own mappings: those belong to a process.
#![expect(unsafe_code, reason = "fills new frames through the device's window")]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::order::FrameRecord;
use super::os;
use crate::units::DeviceOrdinal;

/// One simulated device.
pub(super) struct Device {
    pub(super) ordinal: DeviceOrdinal,
    pub(super) capacity: u64,
    file: OwnedFd,
    file_bytes: u64,
    window: u64,
    memory: Mutex<Memory>,
}

struct Memory {
    used_bytes: u64,
    outside_bytes: u64,
    /// Free ranges of the file, start to length.
    free: BTreeMap<u64, u64>,
}

impl Device {
    pub(super) fn new(ordinal: DeviceOrdinal, capacity: u64, granularity: u64) -> io::Result<Self> {
        let file_bytes = (capacity * 2).next_multiple_of(granularity);
        let file = os::memory_file(file_bytes)?;
        let window = os::map_window(&file, file_bytes)?;
        let free = BTreeMap::from([(0, file_bytes)]);
        let memory = Mutex::new(Memory { used_bytes: 0, outside_bytes: 0, free });
        Ok(Self { ordinal, capacity, file, file_bytes, window, memory })
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Bytes that are neither frames of any process nor used from outside.
    pub(super) fn free_bytes(&self) -> u64 {
        let memory = self.memory.lock();
        self.capacity.saturating_sub(memory.used_bytes.saturating_add(memory.outside_bytes))
    }

    pub(super) fn set_outside_bytes(&self, bytes: u64) {
        self.memory.lock().outside_bytes = bytes;
    }

    /// A range of the file for a frame, first fit; `None` when the device is full.
    fn take(&self, bytes: u64) -> Option<u64> {
        let mut memory = self.memory.lock();
        let used = memory.used_bytes.checked_add(bytes)?;
        if used.checked_add(memory.outside_bytes)? > self.capacity {
            return None;
        }
        let (&offset, &length) = memory.free.iter().find(|&(_, &length)| length >= bytes)?;
        memory.free.remove(&offset);
        if length > bytes {
            memory.free.insert(offset + bytes, length - bytes);
        }
        memory.used_bytes = used;
        Some(offset)
    }

    fn give(&self, offset: u64, bytes: u64) {
        if let Err(error) = os::punch(&self.file, offset, bytes) {
            log::warn!("sim: the memory of a frame was not given back: {error}");
        }
        let mut memory = self.memory.lock();
        memory.used_bytes -= bytes;
        let (mut start, mut length) = (offset, bytes);
        if let Some((&before, &before_length)) = memory.free.range(..offset).next_back()
            && before + before_length == offset
        {
            memory.free.remove(&before);
            (start, length) = (before, before_length + length);
        }
        if let Some(after_length) = memory.free.remove(&(offset + bytes)) {
            length += after_length;
        }
        memory.free.insert(start, length);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: frames hold the device, so none is left that points into the window.
        let _ = unsafe { os::unmap(self.window, self.file_bytes) };
    }
}

/// What one process holds of one device.
#[derive(Default)]
pub(super) struct Holdings {
    pub(super) frames: AtomicU64,
    pub(super) bytes: AtomicU64,
}

/// Host memory that is mapped at device addresses: one node, a memory file of its own, made when
/// the first frame is. What happens to it belongs to the first device, whose loss it shares.
#[derive(Default)]
pub(super) struct HostFrames {
    memory: OnceLock<Arc<Device>>,
    pub(super) holdings: Arc<Holdings>,
}

/// Host memory for frames, in bytes; twice that in addresses.
const HOST_CAPACITY: u64 = 8 << 30;

impl HostFrames {
    pub(super) fn memory(&self, granularity: u64) -> io::Result<Arc<Device>> {
        if let Some(memory) = self.memory.get() {
            return Ok(Arc::clone(memory));
        }
        let made = Arc::new(Device::new(DeviceOrdinal(0), HOST_CAPACITY, granularity)?);
        Ok(Arc::clone(self.memory.get_or_init(|| made)))
    }
}

/// Physical memory: lives until its handle is released and its last mapping has gone.
pub(super) struct Frame {
    pub(super) device: Arc<Device>,
    holdings: Arc<Holdings>,
    pub(super) handle: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) record: Mutex<FrameRecord>,
    /// Bit b: the operating system has put memory behind block b, a 64th of the frame.
    warm: AtomicU64,
}

const OS_PAGE: u64 = 4096;

/// A frame's bytes before anybody wrote them, with `poison=1`.
const POISON: u8 = 0xA5;

impl Frame {
    /// A new frame; `None` when the device is full.
    pub(super) fn new(
        device: &Arc<Device>,
        holdings: &Arc<Holdings>,
        handle: u64,
        bytes: u64,
        poison: bool,
    ) -> Option<Arc<Self>> {
        let offset = device.take(bytes)?;
        holdings.frames.fetch_add(1, Ordering::Relaxed);
        holdings.bytes.fetch_add(bytes, Ordering::Relaxed);
        let (device, holdings) = (device.clone(), holdings.clone());
        let (record, warm) = (Mutex::default(), AtomicU64::new(0));
        let frame = Arc::new(Self { device, holdings, handle, offset, bytes, record, warm });
        if poison {
            // SAFETY: the range was just taken, lies in the window, and nobody else has it.
            unsafe { os::fill(frame.window_address(0), POISON, bytes as usize) };
        }
        Some(frame)
    }

    /// Puts memory behind the blocks of the frame that lie in the range whole, if need be.
    pub(super) fn warm_up(&self, offset: u64, bytes: u64) {
        let block = self.bytes / 64;
        if block == 0 || !block.is_multiple_of(OS_PAGE) {
            return;
        }
        let (first, end) = (offset.div_ceil(block), (offset + bytes) / block);
        if first >= end {
            return;
        }
        let blocks = (u64::MAX >> (64 - (end - first))) << first;
        if blocks & !self.warm.fetch_or(blocks, Ordering::Relaxed) != 0 {
            os::populate(self.window_address(first * block), (end - first) * block);
        }
    }

    /// Where the device itself reads and writes byte `offset` of the frame.
    pub(super) fn window_address(&self, offset: u64) -> u64 {
        self.device.window + self.offset + offset
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        self.device.give(self.offset, self.bytes);
        self.holdings.frames.fetch_sub(1, Ordering::Relaxed);
        self.holdings.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_two_sizes_fill_the_device_to_the_byte() {
        let device = Arc::new(Device::new(DeviceOrdinal(0), 16 << 12, 1 << 12).unwrap());
        let holdings = Arc::default();
        let frame = |pages: u64| Frame::new(&device, &holdings, 1, pages << 12, true);
        let mut small: Vec<_> = (0..16).map(|_| frame(1).unwrap()).collect();
        assert!(frame(1).is_none());
        // Every other one goes: no eight pages lie together, and they fit all the same.
        let mut keep = false;
        small.retain(|_| {
            keep = !keep;
            keep
        });
        let large = frame(8).unwrap();
        assert_eq!(device.free_bytes(), 0);
        drop((small, large));
        assert_eq!(device.free_bytes(), 16 << 12);
        assert_eq!(device.memory.lock().free.len(), 1);
        assert_eq!(holdings.frames.load(Ordering::Relaxed), 0);
    }
}
