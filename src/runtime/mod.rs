//! The runtime of one device: what a program opens, and hands VBARs out of.
//!
//! Owns the wiring (driver, context, pager) and one registry for the process: opening a device
//! again gives the same runtime. Makes no decision and holds no page.

mod ahead;
mod allocation;
mod bar;
mod guards;
mod model;
mod pressure;
mod statistics;
mod tracing;
mod transfer;

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::copy::engine::Engine;
use crate::driver::{CaptureState, DeviceAttribute, Driver, DriverCode};
use crate::error::{Error, ErrorCode, Result};
use crate::host::spare::HostRoom;
use crate::memory::pager::{
    Faulted, Follow, Freed, Hold, MemoryNumbers, Pager, Reclaim, Request, is_work_pending,
};
use crate::memory::pins::{Pins, Token};
use crate::options::{RuntimeOptions, STAGING_SLOTS_MAX, Threads};
use crate::process;
use crate::sync::Mutex;
use crate::sync::device::Device;
use crate::torch::Allocator;
use crate::units::{DeviceOrdinal, PageSize, Stream};

pub use ahead::HINT_RANGES_MAX;
pub(crate) use ahead::check_hint;
pub use allocation::{Allocation, AllocationFault, FillGuard};
pub use bar::{EndOfRun, Fault, Guard, Vbar};
pub use guards::Guards;
pub use model::ModelBar;
pub use statistics::Statistics;

use pressure::Housekeeping;

/// The runtime of one device, shared by everyone who opened it.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

struct Inner {
    pager: Arc<Pager>,
    housekeeping: Housekeeping,
    engine: Arc<Engine>,
    pins: Pins,
    torch: Mutex<Option<Arc<Allocator>>>,
    primary: Primary,
    addresses: Addresses,
}

/// Whose the context is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Primary {
    /// The device's primary context, which the runtime holds a count on.
    Retained,
    /// The caller's own.
    Foreign,
}

/// Whether VBARs of the device have addresses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Addresses {
    Reserved,
    /// No virtual memory management: stand-in addresses, every fault offloaded.
    StandIn,
}

struct Registered {
    driver: Weak<dyn Driver>,
    device: DeviceOrdinal,
    runtime: Weak<Inner>,
}

static REGISTRY: Mutex<Vec<Registered>> = Mutex::new(Vec::new());

impl Runtime {
    /// Opens a device, or shares its runtime when it is open: then the page size and the context
    /// must be the same, and a budget, headroom or threads that are given are applied as changes.
    ///
    /// # Errors
    /// `DeviceNotRegistered` for an ordinal that the driver does not have, `AlreadyOpen` for
    /// another page size or context, `Unsupported` for a page size that is no multiple of the
    /// device's granularity, `Io` when a thread cannot be had, and what the driver says.
    pub fn open(
        driver: Arc<dyn Driver>,
        device: DeviceOrdinal,
        options: RuntimeOptions,
    ) -> Result<Self> {
        let _entering = process::enter()?;
        let mut registry = REGISTRY.lock();
        registry.retain(|entry| entry.runtime.strong_count() > 0);
        if let Some(runtime) = find(&registry, &driver, device) {
            drop(registry);
            runtime.apply(&options)?;
            return Ok(runtime);
        }
        let made = Self::open_new(Arc::clone(&driver), device, options);
        if let Ok(runtime) = &made {
            registry.push(Registered {
                driver: Arc::downgrade(&driver),
                device,
                runtime: Arc::downgrade(&runtime.inner),
            });
        }
        // With no lock held: a runtime that does not start is closed, which may wait, and the
        // logger is the program's.
        drop(registry);
        let opened = made.and_then(|runtime| runtime.start().map(|()| runtime));
        let described = driver.description();
        match &opened {
            Ok(_) => log::info!("device {device} opened on {described}"),
            Err(error) => log::info!("device {device} was not opened on {described}: {error}"),
        }
        opened
    }

    /// The runtime of a device that is open.
    ///
    /// # Errors
    /// `DeviceNotRegistered` when it is not.
    pub fn opened(driver: &Arc<dyn Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _entering = process::enter()?;
        find(&REGISTRY.lock(), driver, device).ok_or_else(|| {
            let text = format!("device {device} was not opened; open it first");
            Error::new(ErrorCode::DeviceNotRegistered, text)
        })
    }

    fn open_new(
        driver: Arc<dyn Driver>,
        ordinal: DeviceOrdinal,
        options: RuntimeOptions,
    ) -> Result<Self> {
        process::watch();
        let count = driver.device_get_count()?;
        if ordinal.0 >= count {
            let text = format!("device {ordinal} does not exist: the driver has {count}");
            return Err(Error::new(ErrorCode::DeviceNotRegistered, text));
        }
        check_headroom(&*driver, ordinal, options.headroom_bytes)?;
        check_staging(options.staging_slot_count)?;
        let addresses = probe_addresses(&*driver, ordinal, options.page_size)?;
        let (context, primary) = match options.context {
            Some(context) => (context, Primary::Foreign),
            None => (driver.device_primary_ctx_retain(ordinal)?, Primary::Retained),
        };
        let device = Arc::new(Device::new(driver, ordinal, context, options));
        tracing::begin();
        let (pager, housekeeping) = (Arc::new(Pager::new(device)), Housekeeping::default());
        let engine = Engine::new();
        let follower: Arc<dyn Follow> = Arc::clone(&engine) as _;
        pager.set_follower(&follower);
        let (pins, torch) = (Pins::default(), Mutex::default());
        let inner = Inner { pager, housekeeping, engine, pins, torch, primary, addresses };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What comes before the first call, and may fail.
    fn start(&self) -> Result<()> {
        {
            let _scope = self.device().enter()?;
            self.device().confirm_context();
            self.device().fences.prepare_context_wait()?;
            if self.device().capture_state(Stream::LEGACY)? == CaptureState::None {
                self.device().fences.learn_default_stream()?;
            }
        }
        self.pager().refresh()?;
        // Not given is not off: whoever shares the runtime already may have asked for threads.
        self.device().options.threads.map_or(Ok(()), |threads| self.set_threads(threads))
    }

    fn apply(&self, options: &RuntimeOptions) -> Result<()> {
        let mine = &self.device().options;
        let context = options.context.unwrap_or(self.device().context);
        if mine.page_size != options.page_size || self.device().context != context {
            let text = format!(
                "device {} is open with pages of {} bytes in context {:#x}, and {} bytes in {:#x} \
                 were asked for; ask for the same, or close it first",
                self.ordinal(),
                mine.page_size.bytes(),
                self.device().context.0,
                options.page_size.bytes(),
                context.0
            );
            return Err(Error::new(ErrorCode::AlreadyOpen, text));
        }
        // Everything is checked before anything is changed.
        check_headroom(&*self.device().driver, self.ordinal(), options.headroom_bytes)?;
        options.threads.map_or(Ok(()), |threads| self.set_threads(threads))?;
        if options.budget_bytes.is_some() {
            self.set_budget(options.budget_bytes)?;
        }
        options.headroom_bytes.map_or(Ok(()), |bytes| self.set_headroom(bytes))
    }

    /// A VBAR of `bytes`, rounded up to whole pages. It takes addresses and no memory; where the
    /// driver has no addresses for it, every fault is offloaded.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, or for more than 2^31 pages.
    pub fn create_bar(&self, bytes: u64) -> Result<Vbar> {
        let reserve = self.inner.addresses == Addresses::Reserved;
        let bar = self.pager().create_bar(bytes, reserve)?;
        Ok(Vbar::new(self.clone(), bar))
    }

    /// Makes several byte ranges resident for use on `stream`, or none of them.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside its VBAR or a VBAR of another runtime; those of
    /// [`Vbar::fault`].
    pub fn fault_many<'a>(
        &self,
        ranges: &[(&'a Vbar, Range<u64>)],
        stream: Stream,
    ) -> Result<Fault<Guards<'a>>> {
        let guards = |holds: Vec<Hold>| {
            let guards = ranges.iter().zip(holds);
            let guards =
                guards.map(|((vbar, bytes), hold)| Guard::new(vbar.inner(), bytes.clone(), hold));
            Guards::new(guards.collect())
        };
        let ranges = ranges.iter().map(|(vbar, bytes)| (*vbar, bytes));
        Ok(match self.fault_holds(ranges, stream)? {
            Faulted::Resident(holds) => Fault::Resident(guards(holds)),
            Faulted::HostMapped(holds) => Fault::HostMapped(guards(holds)),
            Faulted::Offloaded(refusal) => Fault::Offloaded(refusal),
        })
    }

    /// As [`Runtime::fault_many`], the pins in the caller's hands.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn fault_holds<'a, R: Borrow<Range<u64>>>(
        &self,
        ranges: impl ExactSizeIterator<Item = (&'a Vbar, R)>,
        stream: Stream,
    ) -> Result<Faulted<Vec<Hold>>> {
        let mut requests = Vec::with_capacity(ranges.len());
        for (vbar, bytes) in ranges {
            if !vbar.runtime().is(self) {
                let text = "a VBAR of another runtime";
                return Err(Error::new(ErrorCode::InvalidArgument, text));
            }
            let pages = vbar.bar().pages_of(bytes.borrow())?;
            requests.push(Request { bar: vbar.bar(), pages });
        }
        self.pager().fault_many(&requests, stream)
    }

    /// Gives several pins back that were taken out of guards, all of this runtime; `stream` as in
    /// [`Runtime::unpin`].
    ///
    /// # Errors
    /// As there, of the first that has one; all are given back.
    pub(crate) fn unpin_holds(&self, holds: &[(&Vbar, &Hold)], stream: Stream) -> Result<()> {
        let pins: Vec<_> = holds.iter().map(|(vbar, hold)| (vbar.bar(), *hold)).collect();
        self.pager().unpin_all_on(&pins, stream)
    }

    /// Whether it is the same runtime.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Gives the pins of a token back. `stream` is the one that the token was faulted for, which
    /// lives still; work that uses the pages was enqueued on it before. When that stream was
    /// destroyed meanwhile pass [`Stream::NONE`]: then no fence covers the use, and the pages are
    /// evicted last, after a wait for the context. Any other stream is one that used them too.
    ///
    /// # Errors
    /// `StaleToken` when the token holds no pins, or they were released by force; `ProcessEnding`;
    /// what the driver says of another stream.
    pub fn unpin(&self, token: Token, stream: Stream) -> Result<()> {
        let (bar, hold) = self.inner.pins.take(token)?;
        self.pager().unpin_on(&bar, &hold, stream)
    }

    /// Sets the explicit budget in bytes, or lifts it, and gives back at once what it no longer
    /// covers, as far as pins and fences allow.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `TimedOut` or `Cancelled` of a wait for the context, or what
    /// the driver says; the budget is set all the same.
    pub fn set_budget(&self, bytes: Option<u64>) -> Result<()> {
        self.pager().set_budget(bytes)
    }

    /// Sets the headroom in bytes; as [`Runtime::set_budget`]. Lowering it maps nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for more than the device's memory; as [`Runtime::set_budget`].
    pub fn set_headroom(&self, bytes: u64) -> Result<()> {
        self.device().check()?;
        check_headroom(&*self.device().driver, self.ordinal(), Some(bytes))
            .map_err(|error| self.device().note(error))?;
        self.pager().set_headroom(bytes)
    }

    /// Explicit budget and headroom as they were set, in bytes; none and 0 in a forked child, which
    /// has no memory of the device, and at exit.
    #[must_use]
    pub fn budget_settings(&self) -> (Option<u64>, u64) {
        self.pager().budget_settings()
    }

    /// Notices pressure now, as the next miss would.
    ///
    /// # Errors
    /// As [`Runtime::set_budget`].
    pub fn refresh(&self) -> Result<()> {
        self.pager().refresh()
    }

    /// Releases frames that no page has to the driver until at most `keep_bytes` are held. Returns
    /// the bytes released.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Cancelled`, or what the driver says.
    pub fn trim(&self, keep_bytes: u64) -> Result<u64> {
        self.pager().trim(keep_bytes)
    }

    /// Gives page-locked host memory back until at most `keep_bytes` are held, or what is left is
    /// in use or the last slot; host frames are none of it. Returns the bytes given back. Waits for
    /// the device.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, and what the driver says.
    pub fn trim_host(&self, keep_bytes: u64) -> Result<u64> {
        self.pager().trim_host(keep_bytes)
    }

    /// Gives host frames back that nobody pins and whose uses are over; see
    /// [`HostMapped`](crate::options::HostMapped). Returns their bytes.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, or what the driver says.
    pub fn trim_host_frames(&self) -> Result<u64> {
        self.pager().trim_host_frames()
    }

    /// Sets who says how much host memory may be held in host frames, beside what the system says
    /// is left.
    pub fn set_host_room(&self, room: Arc<dyn HostRoom>) {
        self.pager().set_host_room(room);
    }

    /// Gives memory of all VBARs back to the driver, lowest rank first; see [`Vbar::free_memory`].
    ///
    /// # Errors
    /// As [`Vbar::free_memory`].
    pub fn free_memory(&self, bytes: u64) -> Result<Freed> {
        self.pager().free_device_memory(bytes)
    }

    /// Registers who is asked for frames before pages are evicted; it is not kept alive.
    pub fn set_reclaim(&self, reclaim: &Arc<dyn Reclaim>) {
        self.pager().set_reclaim(reclaim);
    }

    /// Tells the runtime that a stream is about to be destroyed; it must still be valid.
    ///
    /// # Errors
    /// What the driver says of the stream; `Unsupported` while it is being captured.
    pub fn retire_stream(&self, stream: Stream) -> Result<()> {
        self.device().check()?;
        let _scope = self.device().enter()?;
        if self.device().capture_state(stream)? != CaptureState::None {
            let text = format!("{stream:?} is being captured: it is retired when that is over");
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        self.device().fences.retire(stream).map_err(|error| self.device().note(error))
    }

    /// PyTorch's allocator on the device's frames, made on first use.
    ///
    /// # Errors
    /// As [`Allocator::new`].
    pub fn torch_allocator(&self) -> Result<Arc<Allocator>> {
        process::check()?;
        let mut made = self.inner.torch.lock();
        if let Some(allocator) = &*made {
            return Ok(Arc::clone(allocator));
        }
        let allocator = Allocator::new(Arc::clone(&self.inner.pager))?;
        Ok(Arc::clone(made.insert(allocator)))
    }

    /// Ends every wait under way in this runtime with `Cancelled`. A thread's own waits are ended
    /// from inside by [`set_wait_check`](crate::set_wait_check).
    pub fn cancel_waits(&self) {
        self.device().cancellation.cancel_waits();
    }

    /// Sets the longest time that a wait of one kind takes in a call; waits under way keep theirs.
    /// With no time a call waits for nothing: it asks once.
    pub fn set_wait_timeout(&self, timeout: Duration) {
        self.device().set_wait_timeout(timeout);
    }

    /// The longest time that a wait takes.
    #[must_use]
    pub fn wait_timeout(&self) -> Duration {
        self.device().wait_timeout()
    }

    /// Starts or ends the threads of the runtime. When the call returns they are as asked for.
    ///
    /// # Errors
    /// `Io` when the operating system gives no thread, `ProcessEnding`.
    pub fn set_threads(&self, threads: Threads) -> Result<()> {
        process::check()?;
        match threads {
            Threads::Off => {
                self.inner.engine.stop(self.pager());
                self.inner.housekeeping.stop();
                self.pager().set_readers(threads);
            }
            Threads::On => {
                self.inner.housekeeping.start(&self.inner.pager)?;
                self.pager().set_readers(threads);
                self.inner.engine.start(&self.inner.pager)?;
            }
        }
        Ok(())
    }

    /// Whether the runtime has threads of its own.
    #[must_use]
    pub fn threads(&self) -> Threads {
        self.inner.housekeeping.threads()
    }

    /// Bytes of frames held, those on the free list included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.numbers().used_bytes
    }

    /// Numbers of the device's memory, taken together. All 0 in a forked child, which has none of
    /// it, and at exit.
    #[must_use]
    pub fn numbers(&self) -> MemoryNumbers {
        self.pager().numbers()
    }

    /// Everything that is counted. In a forked child, and at exit, what happened until then; what
    /// is held is 0 there.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        Statistics::of(self.pager(), self.engine_numbers())
    }

    /// The device's ordinal.
    #[must_use]
    pub fn ordinal(&self) -> DeviceOrdinal {
        self.device().ordinal
    }

    /// The size of pages and frames.
    #[must_use]
    pub fn page_size(&self) -> PageSize {
        self.device().options.page_size
    }

    /// The device below, for programs that launch work themselves.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.pager().device
    }

    /// Checks the invariants of the pager's tables; for tests.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.pager().is_valid()
    }

    fn pager(&self) -> &Pager {
        &self.inner.pager
    }

    fn pins(&self) -> &Pins {
        &self.inner.pins
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.engine.stop(&self.pager);
        self.housekeeping.stop();
        if let Some(allocator) = self.torch.get_mut() {
            allocator.close();
        }
        let closed = self.pager.close();
        let device = &self.pager.device;
        if let Err(error) = &closed {
            log::error!("closing device {}: {error}; what it holds stays", device.ordinal);
        }
        // The last release of a context waits for its work, which was not to be waited for.
        let pending = closed.is_err_and(|error| is_work_pending(&error));
        if self.primary == Primary::Retained
            && !pending
            && device.check().is_ok()
            && let Err(error) = device.driver.device_primary_ctx_release(device.ordinal)
        {
            log::warn!("closing device {}: {error}", device.ordinal);
        }
        tracing::end();
    }
}

fn find(
    registry: &[Registered],
    driver: &Arc<dyn Driver>,
    device: DeviceOrdinal,
) -> Option<Runtime> {
    let same = |entry: &&Registered| {
        entry.device == device && std::ptr::addr_eq(entry.driver.as_ptr(), Arc::as_ptr(driver))
    };
    let inner = registry.iter().find(same)?.runtime.upgrade()?;
    Some(Runtime { inner })
}

/// A headroom larger than the device is a mistake.
fn check_headroom(driver: &dyn Driver, device: DeviceOrdinal, headroom: Option<u64>) -> Result<()> {
    let total = driver.device_total_mem(device)?;
    match headroom {
        Some(bytes) if bytes > total => {
            let text = format!("a headroom of {bytes} bytes on a device of {total}");
            Err(Error::new(ErrorCode::InvalidArgument, text))
        }
        _ => Ok(()),
    }
}

fn check_staging(slot_count: usize) -> Result<()> {
    if (1..=STAGING_SLOTS_MAX).contains(&slot_count) {
        return Ok(());
    }
    let text = format!("{slot_count} staging slots: 1 to {STAGING_SLOTS_MAX} are allowed");
    Err(Error::new(ErrorCode::InvalidArgument, text))
}

/// Whether the device has virtual memory management, with pages of this size.
fn probe_addresses(
    driver: &dyn Driver,
    device: DeviceOrdinal,
    page_size: PageSize,
) -> Result<Addresses> {
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    match driver.device_get_attribute(device, attribute) {
        Ok(0) => {
            log::warn!("device {device} has no virtual memory management: nothing is resident");
            return Ok(Addresses::StandIn);
        }
        Ok(_) => {}
        // A driver that does not know the attribute has no virtual memory management.
        Err(error) if error.code == DriverCode::INVALID_VALUE => return Ok(Addresses::StandIn),
        Err(error) => return Err(error.into()),
    }
    let granularity = driver.mem_get_allocation_granularity(device)?;
    if granularity == 0 || !page_size.bytes().is_multiple_of(granularity) {
        let text = format!(
            "pages of {} bytes are no multiple of device {device}'s granularity, {granularity}",
            page_size.bytes()
        );
        return Err(Error::new(ErrorCode::Unsupported, text));
    }
    Ok(Addresses::Reserved)
}
