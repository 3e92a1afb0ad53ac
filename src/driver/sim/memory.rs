//! Address space and frames of one process: the MMU of the simulated device.
//!
//! Owns reservations, mappings and frame handles, in sparse trees, so that a reservation of 1 TiB
//! costs nothing. Each change is made in the operating system's address space as well: a
//! reservation is `PROT_NONE`, a mapping a view of the device's memory file, so an address with
//! nothing behind it faults. The device itself reads and writes through its own window, after
//! looking the address up here under a read lock, so a breach is a report and never a signal.
//! Nothing here waits for a stream.
#![expect(unsafe_code, reason = "maps and unmaps views of device memory in the address space")]

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Core;
use super::device::{Device, Frame, Holdings};
use super::order::{Clock, FrameEvent};
use super::os;
use super::verb::Verb;
use crate::driver::{DriverCode, DriverResult, FrameHandle, HostNode};
use crate::units::{DeviceAddress, DeviceOrdinal};

/// A frame at an address.
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) frame: Arc<Frame>,
    /// Bit d: device d may read and write.
    pub(super) access: u64,
    /// The latest operation of each stream that was enqueued through this mapping.
    pub(super) touched: Mutex<Clock>,
}

/// Part of a range inside one mapping.
pub(super) struct Piece<'a> {
    pub(super) mapping: &'a Mapping,
    /// First byte, counted from the frame's start.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// The address space of a process.
#[derive(Default)]
pub(super) struct Space {
    /// Start to length.
    pub(super) reservations: BTreeMap<u64, u64>,
    pub(super) reserved_bytes: u64,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    frames: HashMap<u64, Arc<Frame>>,
    /// Start to length of what `mem_alloc` gave out: a reservation and a mapping each.
    allocations: HashMap<u64, u64>,
    frames_made: u64,
}

impl Space {
    /// The part of `address..address + bytes` in the mapping at `address`, if there is one.
    pub(super) fn piece(&self, address: u64, bytes: u64) -> Option<Piece<'_>> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        let offset = address - start;
        let left = mapping.bytes.checked_sub(offset).filter(|&left| left > 0)?;
        Some(Piece { mapping, offset, bytes: bytes.min(left) })
    }

    /// Calls `each` on the pieces of a range; the first address with nothing behind it, if any.
    pub(super) fn for_pieces(
        &self,
        address: u64,
        bytes: u64,
        mut each: impl FnMut(u64, &Piece<'_>),
    ) -> Option<u64> {
        let mut done = 0;
        while done < bytes {
            let at = address.wrapping_add(done);
            let Some(piece) = self.piece(at, bytes - done) else { return Some(at) };
            each(at, &piece);
            done += piece.bytes;
        }
        None
    }

    /// The mappings that make up the range exactly and whole; `None` when they do not.
    fn whole(&self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let end = address.checked_add(bytes)?;
        let mut next = address;
        let mut starts = Vec::new();
        for (&start, mapping) in self.mappings.range(address..end) {
            if start != next {
                return None;
            }
            next += mapping.bytes;
            starts.push(start);
        }
        (next == end && !starts.is_empty()).then_some(starts)
    }

    fn in_one_reservation(&self, address: u64, bytes: u64) -> bool {
        let reservation = self.reservations.range(..=address).next_back();
        let Some(end) = address.checked_add(bytes) else { return false };
        reservation.is_some_and(|(&start, &length)| end <= start + length)
    }

    fn is_unmapped(&self, address: u64, bytes: u64) -> bool {
        let before = self.mappings.range(..address + bytes).next_back();
        before.is_none_or(|(&start, mapping)| start + mapping.bytes <= address)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for (&start, &bytes) in &self.reservations {
            // SAFETY: the reservation is ours, and with the space its last user goes.
            let _ = unsafe { os::unmap(start, bytes) };
        }
    }
}

fn system_code(error: &io::Error) -> DriverCode {
    log::warn!("sim: the operating system refused a mapping: {error}");
    DriverCode::OPERATING_SYSTEM
}

impl Core {
    fn is_aligned(&self, value: u64) -> bool {
        value.is_multiple_of(self.options.granularity)
    }

    fn needs_vmm(&self, verb: Verb) -> DriverResult<()> {
        if self.options.vmm { Ok(()) } else { Err(verb.error(DriverCode::NOT_SUPPORTED)) }
    }

    /// Checks what all calls on ranges of addresses share.
    fn check_range(&self, verb: Verb, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        self.needs_vmm(verb)?;
        let fits = address.checked_add(bytes).is_some();
        if bytes == 0 || !fits || !self.is_aligned(bytes) || !self.is_aligned(address.0) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        Ok(())
    }

    pub(super) fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<u64> {
        let verb = Verb::MemAddressReserve;
        self.needs_vmm(verb)?;
        self.current_alive(verb)?;
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if bytes == 0 || !self.is_aligned(bytes) || !aligned {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let mut space = self.space.write();
        let total = space.reserved_bytes.checked_add(bytes);
        let limit = self.options.address_space.unwrap_or(u64::MAX);
        if total.is_none_or(|total| total > limit) {
            return Err(verb.error(DriverCode::OUT_OF_MEMORY));
        }
        let start = os::reserve(bytes, alignment.max(self.options.granularity))
            .map_err(|_| verb.error(DriverCode::OUT_OF_MEMORY))?;
        space.reservations.insert(start, bytes);
        space.reserved_bytes += bytes;
        Ok(start)
    }

    pub(super) fn mem_address_free(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        let verb = Verb::MemAddressFree;
        self.check_range(verb, address, bytes)?;
        self.current_alive(verb)?;
        let mut space = self.space.write();
        let exact = space.reservations.get(&address.0) == Some(&bytes);
        if !exact || !space.is_unmapped(address.0, bytes) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        // SAFETY: a reservation of ours with nothing mapped, which nobody may use from now on.
        unsafe { os::unmap(address.0, bytes) }.map_err(|error| verb.error(system_code(&error)))?;
        space.reservations.remove(&address.0);
        space.reserved_bytes -= bytes;
        Ok(())
    }

    pub(super) fn mem_create(
        &self,
        device: DeviceOrdinal,
        bytes: u64,
    ) -> DriverResult<FrameHandle> {
        let verb = Verb::MemCreate;
        self.needs_vmm(verb)?;
        let index = self.device_index(device, verb)?;
        self.alive(index, verb)?;
        if bytes == 0 || !self.is_aligned(bytes) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        self.create_frame(&self.devices[index], &self.holdings[index], bytes, verb)
    }

    /// The host has one node, and memory that is not counted as any device's.
    pub(super) fn mem_create_host(&self, node: HostNode, bytes: u64) -> DriverResult<FrameHandle> {
        let verb = Verb::MemCreateHost;
        self.needs_vmm(verb)?;
        if !self.options.host_vmm {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        if bytes == 0 || !self.is_aligned(bytes) || node != HostNode(0) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let memory = self.host_frames.memory(self.options.granularity);
        let memory = memory.map_err(|_| verb.error(DriverCode::OUT_OF_MEMORY))?;
        self.create_frame(&memory, &self.host_frames.holdings, bytes, verb)
    }

    fn create_frame(
        &self,
        memory: &Arc<Device>,
        holdings: &Arc<Holdings>,
        bytes: u64,
        verb: Verb,
    ) -> DriverResult<FrameHandle> {
        let mut space = self.space.write();
        let handle = space.frames_made + 1;
        let frame = Frame::new(memory, holdings, handle, bytes, self.options.poison)
            .ok_or_else(|| verb.error(DriverCode::OUT_OF_MEMORY))?;
        frame.record.lock().note(FrameEvent::Created);
        space.frames_made = handle;
        space.frames.insert(handle, frame);
        Ok(FrameHandle(handle))
    }

    pub(super) fn mem_release(&self, handle: FrameHandle) -> DriverResult<()> {
        let verb = Verb::MemRelease;
        self.needs_vmm(verb)?;
        let mut space = self.space.write();
        let frame = space.frames.get(&handle.0);
        let frame = frame.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        self.alive(frame.device.ordinal.0 as usize, verb)?;
        frame.record.lock().note(FrameEvent::Released);
        let frame = space.frames.remove(&handle.0);
        // Giving memory back to the operating system takes a while: not under the lock.
        drop(space);
        drop(frame);
        Ok(())
    }

    pub(super) fn mem_map(
        &self,
        address: DeviceAddress,
        bytes: u64,
        handle: FrameHandle,
    ) -> DriverResult<()> {
        let verb = Verb::MemMap;
        self.check_range(verb, address, bytes)?;
        let mut space = self.space.write();
        let frame = space.frames.get(&handle.0).cloned();
        let frame = frame.ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE))?;
        self.alive(frame.device.ordinal.0 as usize, verb)?;
        if bytes < frame.bytes {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        let placed =
            space.in_one_reservation(address.0, bytes) && space.is_unmapped(address.0, bytes);
        if bytes > frame.bytes || !placed {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        if space.mappings.len() as u64 >= self.options.mappings.unwrap_or(u64::MAX) {
            return Err(verb.error(DriverCode::OPERATING_SYSTEM));
        }
        // SAFETY: the range lies in a reservation of ours and nothing is mapped there.
        unsafe { os::map_view(address.0, bytes, frame.device.file(), frame.offset) }
            .map_err(|error| verb.error(system_code(&error)))?;
        frame.record.lock().note(FrameEvent::Mapped(address));
        let touched = Mutex::default();
        space.mappings.insert(address.0, Mapping { bytes, frame, access: 0, touched });
        Ok(())
    }

    pub(super) fn mem_set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        devices: &[DeviceOrdinal],
    ) -> DriverResult<()> {
        let verb = Verb::MemSetAccess;
        self.check_range(verb, address, bytes)?;
        let mut mask = 0;
        for &device in devices {
            mask |= 1u64 << self.device_index(device, verb)?;
        }
        let mut space = self.space.write();
        let starts = space.whole(address.0, bytes);
        let starts = starts.filter(|_| mask != 0);
        let starts = starts.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        for start in &starts {
            let memory = &space.mappings[start].frame.device;
            self.alive(memory.ordinal.0 as usize, verb)?;
            self.check_reach(memory, mask, verb)?;
        }
        // SAFETY: the range is made of mappings in reservations of ours.
        unsafe { os::allow_access(address.0, bytes) }
            .map_err(|error| verb.error(system_code(&error)))?;
        for start in starts {
            if let Some(mapping) = space.mappings.get_mut(&start) {
                mapping.access |= mask;
                let mut record = mapping.frame.record.lock();
                record.note(FrameEvent::AccessSet(DeviceAddress(start)));
            }
        }
        Ok(())
    }

    /// Whether each device of a mask reaches a memory: its own and the host's always, another's as
    /// a peer.
    fn check_reach(&self, memory: &Arc<Device>, mask: u64, verb: Verb) -> DriverResult<()> {
        let owner = self.devices.iter().position(|device| Arc::ptr_eq(device, memory));
        match owner {
            Some(owner) if !self.options.peers && mask & !(1 << owner) != 0 => {
                Err(verb.error(DriverCode::INVALID_DEVICE))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn mem_unmap(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        let verb = Verb::MemUnmap;
        self.check_range(verb, address, bytes)?;
        let mut space = self.space.write();
        let starts = space.whole(address.0, bytes);
        let starts = starts.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        for start in &starts {
            self.alive(space.mappings[start].frame.device.ordinal.0 as usize, verb)?;
        }
        // SAFETY: the range is made of mappings in reservations of ours. The device works through
        // its own window, so nothing that still runs can fault here.
        unsafe { os::unmap_view(address.0, bytes) }
            .map_err(|error| verb.error(system_code(&error)))?;
        let mut gone = Vec::with_capacity(starts.len());
        for start in starts {
            gone.extend(space.mappings.remove(&start).map(|mapping| (start, mapping)));
        }
        drop(space);
        for (start, mapping) in &gone {
            self.check_unmapped(DeviceAddress(*start), mapping);
        }
        // Frames whose last mapping went give their memory back here, outside the lock.
        drop(gone);
        Ok(())
    }

    /// Reports the unmapping of a page that work not known to have finished was enqueued through.
    fn check_unmapped(&self, address: DeviceAddress, mapping: &Mapping) {
        let unseen = {
            let order = self.order.lock();
            let touched = mapping.touched.lock();
            order.host.first_unseen(&touched).map(|slot| order.stream_of(slot))
        };
        let history = {
            let mut record = mapping.frame.record.lock();
            record.note(FrameEvent::Unmapped(address));
            record.history()
        };
        if let Some(stream) = unseen {
            let frame = mapping.frame.handle;
            self.violation(
                mapping.frame.device.ordinal.0 as usize,
                format!(
                    "{address} was unmapped while work of stream {stream} through it is not known \
                     to have finished; frame {frame}: {history}"
                ),
            );
        }
    }

    /// A reservation with a frame of its own, which no handle names.
    pub(super) fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddress> {
        let verb = Verb::MemAlloc;
        let context = self.current(verb)?;
        let index = context.device;
        self.alive(index, verb)?;
        let whole = bytes.checked_next_multiple_of(self.options.granularity);
        let Some(whole) = whole.filter(|_| bytes > 0) else {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        };
        let handle = self.create_frame(&self.devices[index], &self.holdings[index], whole, verb)?;
        let mut space = self.space.write();
        let frame = space.frames.remove(&handle.0).expect("it was just made");
        let failed = |error: io::Error| verb.error(system_code(&error));
        let start = os::reserve(whole, self.options.granularity).map_err(failed)?;
        // SAFETY: the range was just reserved, and nobody knows of it yet.
        let mapped = unsafe { os::map_view(start, whole, frame.device.file(), frame.offset) }
            // SAFETY: it was just mapped.
            .and_then(|()| unsafe { os::allow_access(start, whole) });
        if let Err(error) = mapped {
            // SAFETY: the range is ours, and nobody knows of it.
            let _ = unsafe { os::unmap(start, whole) };
            return Err(failed(error));
        }
        frame.record.lock().note(FrameEvent::Mapped(DeviceAddress(start)));
        let (access, touched) = (1 << index, Mutex::default());
        space.mappings.insert(start, Mapping { bytes: whole, frame, access, touched });
        space.reservations.insert(start, whole);
        space.reserved_bytes += whole;
        space.allocations.insert(start, whole);
        Ok(DeviceAddress(start))
    }

    /// Waits for the device first, as launches on other threads do.
    pub(super) fn mem_free(&self, address: DeviceAddress) -> DriverResult<()> {
        let verb = Verb::MemFree;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        if !self.space.read().allocations.contains_key(&address.0) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        self.wait_for_device(None);
        let mut space = self.space.write();
        let Some(bytes) = space.allocations.remove(&address.0) else {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        };
        // SAFETY: a reservation of ours whose only mapping goes with it; no work is pending.
        unsafe { os::unmap(address.0, bytes) }.map_err(|error| verb.error(system_code(&error)))?;
        space.reservations.remove(&address.0);
        space.reserved_bytes -= bytes;
        let mapping = space.mappings.remove(&address.0);
        drop(space);
        if let Some(mapping) = &mapping {
            self.check_unmapped(address, mapping);
        }
        Ok(())
    }
}
