//! Anonymous memory that begins where a huge page does.
//!
//! Owns one mapping of the bytes asked for, in whole pages. Memory that begins in the middle of a
//! huge page loses that one and its last, or shares them with a neighbour: small pages instead,
//! each touched and locked by itself. What lies behind the last whole huge page gets small ones: a
//! huge one would be memory that nobody asked for.

#![expect(unsafe_code, reason = "maps and unmaps memory, part of a mapping too")]

use std::io;
use std::ptr::NonNull;

use crate::units::MIB;

/// A huge page of this machine, or a part of one.
pub const HUGE_PAGE_BYTES: usize = 2 * MIB as usize;

/// See the module's text.
pub struct AnonymousMemory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and the type gives no access to its bytes.
unsafe impl Send for AnonymousMemory {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMemory {}

/// Bytes of a page of the operating system.
pub(super) fn os_page() -> u64 {
    // SAFETY: asks for a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

impl AnonymousMemory {
    /// Maps `bytes`, nothing behind them yet. A fork's child has none of it: after a fork, writing
    /// would give this process other pages than those that the device reads, on older kernels.
    ///
    /// # Errors
    /// What mmap(2) says, or `InvalidInput` for no bytes.
    pub fn map(bytes: usize) -> io::Result<Self> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let whole = bytes.checked_next_multiple_of(os_page() as usize).filter(|whole| *whole > 0);
        let whole = whole.ok_or_else(invalid)?;
        let mapped = whole.checked_add(HUGE_PAGE_BYTES).ok_or_else(invalid)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping where the system has room for it.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.cast::<u8>();
        let before = start.align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `before` is less than the huge page that was mapped beside `whole`.
        let base = unsafe { start.add(before) };
        // SAFETY: `base + whole` is the mapping's end at most.
        let end = unsafe { base.add(whole) };
        unmap(start, before);
        unmap(end, HUGE_PAGE_BYTES - before);
        let base = NonNull::new(base).ok_or_else(invalid)?;
        let memory = Self { base, bytes: whole };
        // A quarter of the page faults' time; a kernel that does not want to changes nothing.
        memory.advise(whole / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, libc::MADV_HUGEPAGE);
        memory.advise(whole, libc::MADV_DONTFORK);
        Ok(memory)
    }

    /// The first byte, at the beginning of a huge page.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn advise(&self, bytes: usize, advice: i32) {
        if bytes > 0 {
            // SAFETY: the range lies in the mapping, and neither advice changes its bytes.
            let _ = unsafe { libc::madvise(self.base.as_ptr().cast(), bytes, advice) };
        }
    }
}

fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: a part of our own mapping that nothing refers to. Where the system refuses it
        // stays: addresses, and nothing behind them.
        let _ = unsafe { libc::munmap(start.cast(), bytes) };
    }
}

impl Drop for AnonymousMemory {
    fn drop(&mut self) {
        unmap(self.base.as_ptr(), self.bytes);
    }
}

#[cfg(all(test, not(vbar_loom)))]
mod tests {
    use super::*;

    /// The mapping that holds an address, as the system tells: its range, and what it counts.
    fn told(address: usize) -> (std::ops::Range<usize>, String) {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let range = |line: &str| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some(number(start)?..number(end)?)
        };
        let lines: Vec<&str> = text.lines().collect();
        let holds = |line: &&str| range(line).is_some_and(|range| range.contains(&address));
        let at = lines.iter().position(holds).expect("it is mapped");
        let counts = lines[at + 1..].iter().take_while(|line| range(line).is_none());
        (range(lines[at]).unwrap(), counts.map(|line| format!("{line}\n")).collect())
    }

    #[test]
    fn every_mapping_begins_with_a_huge_page_and_nothing_lies_behind_it() {
        let bytes = 16 * MIB as usize + 4096;
        let windows: Vec<_> = (0..9).map(|_| AnonymousMemory::map(bytes).unwrap()).collect();
        for window in &windows {
            let start = window.base().as_ptr() as usize;
            assert_eq!(start % HUGE_PAGE_BYTES, 0);
            // The last byte's mapping ends with the window: there is no room for a huge page.
            assert_eq!(told(start + bytes - 1).0.end, start + bytes);
            // `hg` is the advice: for the huge pages alone.
            let advised = |at: usize| {
                let (_, counts) = told(at);
                let flags = counts.lines().find_map(|line| line.strip_prefix("VmFlags:"));
                flags.unwrap().split_whitespace().any(|flag| flag == "hg")
            };
            if advised(start) {
                assert!(advised(start + bytes - 4097) && !advised(start + bytes - 1));
            }
        }
    }

    #[test]
    fn its_bytes_are_its_own_and_go_with_it() {
        for bytes in [1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5] {
            let memory = AnonymousMemory::map(bytes).unwrap();
            // SAFETY: the mapping has that many bytes, which nothing else refers to.
            let all = unsafe { std::slice::from_raw_parts_mut(memory.base().as_ptr(), bytes) };
            assert!(all.iter().all(|byte| *byte == 0));
            all.fill(7);
        }
        assert_eq!(AnonymousMemory::map(0).err().unwrap().kind(), io::ErrorKind::InvalidInput);
        assert!(AnonymousMemory::map(usize::MAX - 4096).is_err());
    }
}
