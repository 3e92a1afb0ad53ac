//! Page-locked memory for bytes of any length: parts of windows, which come back.
//!
//! Owns the windows that it was given and knows what of each is free; parts never overlap, and
//! nobody touches a window as a whole while one of its parts is out. Locks nothing itself, and
//! counts nothing against the allowance: whoever adds a window has held its bytes, and gives them
//! back with the windows that [`Carver::take_idle`] returns.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::host::locked::LockedSlot;
use crate::process;
use crate::sync::Mutex;

/// Parts begin at multiples of this many bytes: an OS page.
const GRAIN: usize = 4096;

/// See the module's text.
#[derive(Default)]
pub struct Carver {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By a number that is not used again.
    windows: BTreeMap<usize, Window>,
    next: usize,
    /// Of all windows.
    free_bytes: u64,
}

struct Window {
    slot: LockedSlot,
    /// What is free: start and length, neighbours joined.
    free: BTreeMap<usize, usize>,
}

impl Window {
    fn is_idle(&self) -> bool {
        self.free.get(&0) == Some(&self.slot.len())
    }
}

/// Page-locked bytes of one owner; they go back to where they are from.
pub struct Part {
    slot: LockedSlot,
    home: Arc<Carver>,
    window: usize,
    start: usize,
    /// What was taken for them, whole grains.
    taken: usize,
}

impl Part {
    /// The bytes.
    pub fn slot(&mut self) -> &mut LockedSlot {
        &mut self.slot
    }

    /// Address of the first byte. Nothing is said of what may be done there.
    pub(super) fn base(&self) -> *const u8 {
        self.slot.base()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slot.len()
    }

    /// Whether it has no bytes, which no part has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slot.is_empty()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Another thread may have held the lock at a fork, for ever.
        if process::ending() {
            return;
        }
        let mut state = self.home.state.lock();
        let State { windows, free_bytes, .. } = &mut *state;
        // Gone with the windows where these were taken out for good.
        let Some(window) = windows.get_mut(&self.window) else { return };
        *free_bytes += self.taken as u64;
        let (mut start, mut length) = (self.start, self.taken);
        if let Some(behind) = window.free.remove(&(start + length)) {
            length += behind;
        }
        if let Some((before, of)) = window.free.range(..start).next_back()
            && before + of == start
        {
            (start, length) = (*before, length + of);
        }
        window.free.insert(start, length);
    }
}

impl State {
    fn add(&mut self, slot: LockedSlot) {
        let free = BTreeMap::from([(0, slot.len())]);
        let number = self.next;
        self.next += 1;
        self.free_bytes += slot.len() as u64;
        self.windows.insert(number, Window { slot, free });
    }
}

impl Carver {
    /// The first part of `bytes` that is free, if there is one; never of no bytes.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Part> {
        self.take_from(&mut self.state.lock(), bytes)
    }

    fn take_from(self: &Arc<Self>, state: &mut State, bytes: usize) -> Option<Part> {
        let wanted = bytes.max(1).checked_next_multiple_of(GRAIN)?;
        let State { windows, free_bytes, .. } = state;
        for (number, window) in windows {
            let fits = window.free.iter().find(|(_, length)| **length >= wanted);
            let Some((start, length)) = fits.map(|(start, length)| (*start, *length)) else {
                continue;
            };
            window.free.remove(&start);
            *free_bytes -= wanted as u64;
            if length > wanted {
                window.free.insert(start + wanted, length - wanted);
            }
            let slot = window.slot.part(start..start + bytes.max(1));
            let (home, window) = (Arc::clone(self), *number);
            return Some(Part { slot, home, window, start, taken: wanted });
        }
        None
    }

    /// Adds a window, and takes a part of `bytes`: the window is idle for nobody before that.
    /// `None` where it is smaller, and so is what was there; it is added all the same.
    pub fn add_for(self: &Arc<Self>, slot: LockedSlot, bytes: usize) -> Option<Part> {
        let mut state = self.state.lock();
        state.add(slot);
        self.take_from(&mut state, bytes)
    }

    /// Adds a window.
    pub fn add(&self, slot: LockedSlot) {
        self.state.lock().add(slot);
    }

    /// Bytes of all windows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.state.lock().windows.values().map(|window| window.slot.len() as u64).sum()
    }

    /// Bytes that are free, in pieces of any length.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.state.lock().free_bytes
    }

    /// Whether some window is idle.
    #[must_use]
    pub fn is_any_idle(&self) -> bool {
        self.state.lock().windows.values().any(Window::is_idle)
    }

    /// Takes up to `count` windows out of which no part is taken, the newest first.
    #[must_use]
    pub fn take_idle(&self, count: usize) -> Vec<LockedSlot> {
        let mut state = self.state.lock();
        let idle = state.windows.iter().rev().filter(|(_, window)| window.is_idle());
        let idle: Vec<usize> = idle.map(|(number, _)| *number).take(count).collect();
        let windows = idle.iter().filter_map(|number| state.windows.remove(number));
        let slots: Vec<LockedSlot> = windows.map(|window| window.slot).collect();
        state.free_bytes -= slots.iter().map(|slot| slot.len() as u64).sum::<u64>();
        slots
    }

    /// Takes windows out of which no part is taken, the newest first, until they are `bytes` or
    /// more.
    #[must_use]
    pub fn take_idle_bytes(&self, bytes: u64) -> Vec<LockedSlot> {
        let (mut taken, mut windows) = (0, Vec::new());
        while taken < bytes
            && let Some(window) = self.take_idle(1).pop()
        {
            taken += window.len() as u64;
            windows.push(window);
        }
        windows
    }

    /// Takes all windows out, for good: their memory goes with the last part of each.
    #[must_use]
    pub fn take_all(&self) -> Vec<LockedSlot> {
        let mut state = self.state.lock();
        state.free_bytes = 0;
        let windows = std::mem::take(&mut state.windows);
        drop(state);
        windows.into_values().map(|window| window.slot).collect()
    }
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::host::locked::lock_window;
    use crate::units::DeviceOrdinal;

    #[test]
    fn parts_do_not_overlap_and_come_back_as_one() {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let carver = Arc::<Carver>::default();
        assert!(carver.take(1).is_none());
        let window = lock_window(&sim.driver(), 4 * GRAIN).unwrap();
        let mut first = carver.add_for(window, GRAIN + 1).unwrap();
        // Nobody finds the window idle before it has a part.
        assert!(!carver.is_any_idle());
        let mut second = carver.take(GRAIN).unwrap();
        let third = carver.take(5).unwrap();
        assert!(carver.take(1).is_none() && carver.take_idle(1).is_empty());
        first.slot().bytes_mut().fill(1);
        second.slot().bytes_mut().fill(2);
        assert!(first.slot().bytes_mut().iter().all(|byte| *byte == 1));
        assert_eq!((first.len(), second.len(), third.len()), (GRAIN + 1, GRAIN, 5));
        // What is free is one again, whatever came back first.
        drop(first);
        assert!(carver.take(2 * GRAIN + 1).is_none());
        drop(second);
        drop(carver.take(3 * GRAIN).unwrap());
        drop(third);
        drop(carver.take(4 * GRAIN).unwrap());
        assert_eq!(carver.free_bytes(), 4 * GRAIN as u64);
        carver.add(lock_window(&sim.driver(), 2 * GRAIN).unwrap());
        assert_eq!(carver.free_bytes(), 6 * GRAIN as u64);
        let kept = carver.take(1).unwrap();
        assert_eq!(carver.take_idle(9).len(), 1);
        assert_eq!((carver.bytes(), carver.free_bytes()), (4 * GRAIN as u64, 3 * GRAIN as u64));
        drop(carver.take_all());
        assert_eq!((carver.bytes(), sim.locked_bytes()), (0, 4 * GRAIN as u64));
        assert_eq!(carver.free_bytes(), 0);
        drop(kept);
        assert_eq!((sim.locked_bytes(), sim.violations()), (0, vec![]));
    }
}
